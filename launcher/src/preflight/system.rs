//! Checks that this system allows what every recording needs. A sandbox that forbids it is reported before the command
//! starts.

use std::ffi::CStr;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use super::refusal::{MEMTRACE_FAILED, Refusal, refuse};

/// Checks that shared memory and Unix sockets can be created.
pub(crate) fn check() -> Result<(), Refusal> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    const NAME: &CStr = c"memtrace-check";
    let attempts: [(&str, &dyn Fn() -> libc::c_int); 2] = [
        // SAFETY: `NAME` is a NUL-terminated string, and the flags are valid for `memfd_create`.
        ("shared memory (memfd_create)", &|| unsafe { libc::memfd_create(NAME.as_ptr(), flags) }),
        // SAFETY: `socket` takes three integers and accesses no memory of ours.
        ("a Unix socket (socket)", &|| unsafe {
            libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)
        }),
    ];
    for (what, make) in attempts {
        let fd = make();
        if fd < 0 {
            let error = io::Error::last_os_error();
            return refuse(
                MEMTRACE_FAILED,
                format!("cannot create {what}: {error}"),
                "allow this system call in the sandbox (seccomp filter)",
            );
        }
        // SAFETY: `fd` was created by the call before and is not negative. Nothing else owns it.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
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
