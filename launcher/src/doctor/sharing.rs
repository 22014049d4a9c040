//! Checks the memory and the socket that a traced process shares with the launcher.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use memtrace_trace::shm::layout::SEGMENT_SIZE;
use memtrace_trace::shm::segment::Segment;

use super::diagnosis::Finding;
use super::units::bytes;
use crate::session;

/// Creates the shared memory of one process, as a recording does.
pub(super) fn memory() -> Finding {
    let what = "shared memory";
    let noexec = std::fs::read_to_string("/proc/sys/vm/memfd_noexec").unwrap_or_default();
    match Segment::create() {
        Ok(_) => Finding::ok(what, "memfd_create works"),
        Err(e) if e.raw_os_error() == Some(libc::EACCES) && noexec.trim() == "2" => {
            Finding::off(what, "vm.memfd_noexec=2 refuses memory files", "as root: sysctl vm.memfd_noexec=1")
        }
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOMEM)) => Finding::off(
            what,
            format!("{e}: {} of address space cannot be mapped", bytes(SEGMENT_SIZE as u64)),
            "raise the limit: ulimit -v unlimited",
        ),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EFBIG)) => {
            Finding::off(what, format!("{e}: files are limited in size"), "raise the limit: ulimit -f unlimited")
        }
        Err(e) => Finding::off(
            what,
            format!("memfd_create: {e}"),
            "allow memfd_create in the sandbox's seccomp profile (Docker's default profile does)",
        ),
    }
}

/// Creates the socket through which a process finds the launcher, and connects to it.
pub(super) fn socket() -> Finding {
    let what = "Unix socket";
    let tried = session::token().and_then(|token| {
        let _listener = session::listen(&token)?;
        UnixStream::connect_addr(&SocketAddr::from_abstract_name(format!("memtrace-{token}"))?)?;
        Ok(())
    });
    match tried {
        Ok(()) => Finding::ok(what, "abstract sockets work"),
        Err(e) => Finding::off(
            what,
            format!("{e:#}"),
            "allow socket(AF_UNIX), bind and connect in the sandbox's seccomp or AppArmor profile",
        ),
    }
}
