//! The session: a name of its own under which traced processes find us, and the environment that tells them.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;

use anyhow::Context;
use memtrace_trace::options::{ENV, Options};

/// A new token: 128 bits from the kernel, so that no two sessions meet. It is no secret: `/proc/net/unix` shows the socket's name, and
/// who knocks is asked for (see `drain::door`).
pub(crate) fn token() -> anyhow::Result<String> {
    let mut bytes = [0u8; 16];
    // SAFETY: a buffer and its length. For so few bytes the call does not return short.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if n != bytes.len() as isize {
        return Err(io::Error::last_os_error()).context("cannot get random bytes");
    }
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// Listens under the token's name (see `memtrace_trace::shm::handshake`).
pub(crate) fn listen(token: &str) -> anyhow::Result<UnixListener> {
    let address = SocketAddr::from_abstract_name(format!("memtrace-{token}"))?;
    UnixListener::bind_addr(&address).context("cannot create a Unix socket")
}

/// Where NVTX looks for who listens to a program's ranges (nvtxDetail/nvtxInit.h).
const NVTX: &str = "NVTX_INJECTION64_PATH";
/// Set where another tool listens, or is about to: Nsight Systems and other users of CUPTI.
const OTHER_TOOLS: [&str; 2] = [NVTX, "CUDA_INJECTION64_PATH"];

/// Puts the library and the session into our own environment, which the command gets as it is, order and all.
///
/// # Safety
/// No other thread may run: see [`std::env::set_var`].
pub(crate) unsafe fn enter(library: &Path, options: &Options) {
    let preload = preload(library.as_os_str(), std::env::var_os("LD_PRELOAD").as_deref());
    // SAFETY: promised by the caller.
    unsafe {
        std::env::set_var("LD_PRELOAD", preload);
        std::env::set_var(ENV, options.encode());
        // A tool that listens to NVTX, or traces CUDA calls and may come to, is there first.
        if OTHER_TOOLS.iter().all(|name| std::env::var_os(name).is_none()) {
            std::env::set_var(NVTX, library);
        }
    }
}

/// Our library first, then everything that was there.
fn preload(library: &OsStr, before: Option<&OsStr>) -> OsString {
    let others = before.unwrap_or_default().as_bytes();
    let is_separator = |b: &u8| *b == b' ' || *b == b':';
    let others = others.split(is_separator).filter(|entry| !entry.is_empty() && *entry != library.as_bytes());
    let all: Vec<&[u8]> = std::iter::once(library.as_bytes()).chain(others).collect();
    OsString::from_vec(all.join(&b':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_entries_are_kept() {
        let preload = |before: &str| preload(OsStr::new("/us.so"), Some(OsStr::new(before))).into_string().unwrap();
        assert_eq!(preload(""), "/us.so");
        assert_eq!(preload("/a.so /b.so"), "/us.so:/a.so:/b.so");
        assert_eq!(preload("/a.so:/us.so::"), "/us.so:/a.so");
    }

    #[test]
    fn a_name_is_taken_once() {
        let token = token().unwrap();
        assert_eq!(token.len(), 32);
        let _listener = listen(&token).unwrap();
        assert!(listen(&token).is_err());
    }
}
