//! The session: a unique name under which traced processes find the launcher, and the environment that passes it to
//! them.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;

use anyhow::{Context, ensure};
use memtrace_trace::options::{ENV, Options};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::sanitizer;

/// The bytes of a token.
const TOKEN_BYTES: usize = 16;

/// Creates a session token: 128 random bits from the kernel, in hexadecimal, so that no two sessions share a name.
///
/// The token is not a secret, because `/proc/net/unix` shows the socket's name. `drain::acceptor` checks who connects.
/// Fails when the kernel provides no random bytes.
pub(crate) fn token() -> anyhow::Result<String> {
    let mut bytes = [0u8; TOKEN_BYTES];
    // The kernel returns requests of up to 256 bytes in full.
    let n =
        getrandom(&mut bytes, GetRandomFlags::empty()).map_err(io::Error::from).context("cannot get random bytes")?;
    ensure!(n == bytes.len(), "cannot get random bytes");
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// Whether a text has the form of a [`token`].
pub(crate) fn is_token(text: &str) -> bool {
    text.len() == 2 * TOKEN_BYTES && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The name of a run's session: the user id of the launcher, and a [`token`]. `running` finds the sessions of a user by
/// it.
pub(crate) fn name_of_run() -> anyhow::Result<String> {
    Ok(format!("{}-{}", rustix::process::geteuid().as_raw(), token()?))
}

/// Listens on the abstract Unix socket that `memtrace_trace::shm::handshake` describes. Fails when it cannot be
/// created.
pub(crate) fn listen(token: &str) -> anyhow::Result<UnixListener> {
    let address = SocketAddr::from_abstract_name(format!("memtrace-{token}"))?;
    UnixListener::bind_addr(&address).context("cannot create a Unix socket")
}

/// The variable that names the library which receives a program's NVTX ranges (nvtxDetail/nvtxInit.h).
const NVTX_INJECTION: &str = "NVTX_INJECTION64_PATH";
/// Variables that show another tool is active or about to be: Nsight Systems and other users of CUPTI.
const OTHER_TOOLS: [&str; 2] = [NVTX_INJECTION, "CUDA_INJECTION64_PATH"];

/// Sets the library and the session in the launcher's own environment. The command inherits that environment unchanged,
/// in the same order. `needs_asan` says that the command loads AddressSanitizer's runtime.
///
/// # Safety
///
/// No other thread may run: see [`std::env::set_var`].
pub(crate) unsafe fn set_environment(library: &Path, options: &Options, needs_asan: bool) {
    let asan_options = sanitizer::asan_options(std::env::var_os(sanitizer::ASAN_OPTIONS).as_deref());
    let preload = preload(library.as_os_str(), std::env::var_os("LD_PRELOAD").as_deref());
    // SAFETY: the caller guarantees that no other thread runs, so no thread reads the environment during the change.
    unsafe {
        std::env::set_var("LD_PRELOAD", preload);
        std::env::set_var(ENV, options.encode());
        if let Some(asan_options) = asan_options.filter(|_| needs_asan) {
            std::env::set_var(sanitizer::ASAN_OPTIONS, asan_options);
        }
        // A tool that receives NVTX ranges, or that traces CUDA calls and may also receive them, takes precedence.
        if OTHER_TOOLS.iter().all(|name| std::env::var_os(name).is_none()) {
            std::env::set_var(NVTX_INJECTION, library);
        }
    }
}

/// The new value of `LD_PRELOAD`: our library first, then the previous entries. A sanitizer's runtime must come before
/// all other libraries, so it stays first.
fn preload(library: &OsStr, before: Option<&OsStr>) -> OsString {
    let others = before.unwrap_or_default().as_bytes();
    let is_separator = |b: &u8| *b == b' ' || *b == b':';
    let others = others.split(is_separator).filter(|entry| !entry.is_empty() && *entry != library.as_bytes());
    let (runtimes, others): (Vec<&[u8]>, Vec<&[u8]>) = others.partition(|entry| sanitizer::is_runtime(entry));
    let all = [runtimes, vec![library.as_bytes()], others].concat();
    OsString::from_vec(all.join(&b':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_preload_entries_are_kept() {
        let preload = |before: &str| preload(OsStr::new("/ours.so"), Some(OsStr::new(before))).into_string().unwrap();
        assert_eq!(preload(""), "/ours.so");
        assert_eq!(preload("/a.so /b.so"), "/ours.so:/a.so:/b.so");
        assert_eq!(preload("/a.so:/ours.so::"), "/ours.so:/a.so");
        assert_eq!(preload("/a.so libasan.so.8"), "libasan.so.8:/ours.so:/a.so");
    }

    #[test]
    fn a_socket_name_can_be_bound_once() {
        let token = token().unwrap();
        assert_eq!(token.len(), 32);
        let _listener = listen(&token).unwrap();
        assert!(listen(&token).is_err());
    }
}
