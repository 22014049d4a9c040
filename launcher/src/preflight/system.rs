//! Whether this system lets us do what every recording needs. A sandbox that forbids it is told before the command starts.

use std::ffi::CStr;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use super::{CANNOT, Refusal, refuse};

/// Makes sure that shared memory and sockets can be had.
pub(crate) fn check() -> Result<(), Refusal> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    const NAME: &CStr = c"memtrace-check";
    let attempts: [(&str, &dyn Fn() -> libc::c_int); 2] = [
        // SAFETY: a C string and valid flags.
        ("shared memory (memfd_create)", &|| unsafe { libc::memfd_create(NAME.as_ptr(), flags) }),
        // SAFETY: plain numbers.
        ("a Unix socket (socket)", &|| unsafe {
            libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)
        }),
    ];
    for (what, make) in attempts {
        let fd = make();
        if fd < 0 {
            let error = io::Error::last_os_error();
            return refuse(
                CANNOT,
                format!(
                    "{what} cannot be had here: {error}; a sandbox's filter of system calls (seccomp) must allow it"
                ),
            );
        }
        // SAFETY: fresh, and nobody else's.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_system_is_fine() {
        assert!(super::check().is_ok());
    }
}
