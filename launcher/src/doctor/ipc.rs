//! Checks the memory and the socket that a traced process shares with the launcher.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use memtrace_trace::shm::layout::SEGMENT_SIZE;
use memtrace_trace::shm::segment::Segment;

use super::report::Check;
use super::units::bytes;
use crate::session;

/// Creates the shared memory of one process, as a recording does.
pub(super) fn memory() -> Check {
    let name = "Shared memory";
    let noexec = std::fs::read_to_string("/proc/sys/vm/memfd_noexec").unwrap_or_default();
    match Segment::create() {
        Ok(_) => Check::ok(name, "memfd_create works"),
        Err(e) if e.raw_os_error() == Some(libc::EACCES) && noexec.trim() == "2" => {
            Check::failed(name, "vm.memfd_noexec=2 forbids memfd_create", "run as root: sysctl vm.memfd_noexec=1")
        }
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOMEM)) => Check::failed(
            name,
            format!("cannot map {} of address space: {e}", bytes(SEGMENT_SIZE as u64)),
            "raise the limit: ulimit -v unlimited",
        ),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EFBIG)) => {
            Check::failed(name, format!("the file size limit is too low: {e}"), "raise the limit: ulimit -f unlimited")
        }
        Err(e) => Check::failed(
            name,
            format!("memfd_create fails: {e}"),
            "allow memfd_create in the sandbox's seccomp profile (Docker's default profile does)",
        ),
    }
}

/// Creates the socket through which a process finds the launcher, and connects to it.
pub(super) fn socket() -> Check {
    let name = "Unix socket";
    let tried = session::token().and_then(|token| {
        let _listener = session::listen(&token)?;
        UnixStream::connect_addr(&SocketAddr::from_abstract_name(format!("memtrace-{token}"))?)?;
        Ok(())
    });
    match tried {
        Ok(()) => Check::ok(name, "abstract sockets work"),
        Err(e) => Check::failed(
            name,
            format!("{e:#}"),
            "allow socket(AF_UNIX), bind and connect in the sandbox's seccomp or AppArmor profile",
        ),
    }
}
