//! Checks that this system allows what every recording needs. A sandbox that forbids it is reported before the command
//! starts.

use std::io;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::refusal::{MEMTRACE_FAILED, Refusal, refuse};

/// Checks that shared memory and Unix sockets can be created.
pub(crate) fn check() -> Result<(), Refusal> {
    let memory = memfd_create("memtrace-check", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    for (what, result) in [("shared memory (memfd_create)", memory), ("a Unix socket (socket)", socket)] {
        if let Err(error) = result {
            let error = io::Error::from(error);
            return refuse(
                MEMTRACE_FAILED,
                format!("cannot create {what}: {error}"),
                "allow this system call in the sandbox (seccomp filter)",
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_system_allows_recording() {
        assert!(super::check().is_ok());
    }
}
