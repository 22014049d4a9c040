//! Safe wrappers of epoll and eventfd, to wait for several descriptors.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: every caller passes the result of a call that created a new descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A set of descriptors, each with a token that identifies it when it becomes readable.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

impl Epoll {
    /// Creates an empty set. Fails when no descriptor is available.
    pub(crate) fn new() -> io::Result<Epoll> {
        // SAFETY: `epoll_create1` takes an integer and accesses no memory of ours.
        owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map(Epoll)
    }

    /// Watches `fd` for input (level-triggered) under `token`. Closing the descriptor removes it.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: token };
        // SAFETY: `self` and `fd` own or borrow their descriptors, so both are open. `event` is valid for reads during
        // the call.
        let result = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Stops watching `fd`.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        // SAFETY: `self` and `fd` own or borrow their descriptors, so both are open. `EPOLL_CTL_DEL` ignores the null
        // event pointer (Linux 2.6.9). A missing entry is an error that can be ignored.
        unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_DEL, fd.as_raw_fd(), std::ptr::null_mut()) };
    }

    /// Waits until a descriptor is readable and stores the tokens in `ready`.
    ///
    /// Returns after `timeout` at the latest. `None` waits without a limit.
    pub(crate) fn wait(&self, timeout: Option<Duration>, ready: &mut Vec<u64>) {
        ready.clear();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 32];
        let timeout = timeout.map_or(-1, |t| t.as_millis().min(i32::MAX as u128) as libc::c_int);
        // SAFETY: `events` is valid for writes of `events.len()` entries, and the kernel writes at most that many.
        // `self` owns the open descriptor.
        let n =
            unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), events.len() as libc::c_int, timeout) };
        ready.extend(events.iter().take(n.max(0) as usize).map(|e| e.u64));
    }
}

/// A flag that epoll can wait for.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    /// Creates a cleared flag. Fails when no descriptor is available.
    pub(crate) fn new() -> io::Result<EventFd> {
        // SAFETY: `eventfd` takes two integers and accesses no memory of ours.
        owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }).map(EventFd)
    }

    /// A handle to the same flag, for another thread.
    pub(crate) fn try_clone(&self) -> io::Result<EventFd> {
        self.0.try_clone().map(EventFd)
    }

    /// Sets the flag.
    pub(crate) fn raise(&self) {
        let one = 1u64;
        // SAFETY: `one` is 8 bytes that are valid for reads, and `self` owns the open descriptor. The write fails only
        // when the counter is full, and then the flag is already set.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Clears the flag.
    pub(crate) fn clear(&self) {
        let mut value = 0u64;
        // SAFETY: `value` is 8 bytes that are valid for writes, and `self` owns the open descriptor. The read fails
        // when the counter is 0, which can be ignored.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut value).cast(), 8) };
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_raised_flag_is_readable() {
        let (epoll, flag) = (Epoll::new().unwrap(), EventFd::new().unwrap());
        epoll.add(flag.as_fd(), 7).unwrap();
        let mut ready = vec![1];
        epoll.wait(Some(Duration::ZERO), &mut ready);
        assert!(ready.is_empty());
        flag.raise();
        epoll.wait(None, &mut ready);
        assert_eq!(ready, [7]);
        flag.clear();
        epoll.wait(Some(Duration::ZERO), &mut ready);
        assert!(ready.is_empty());
    }
}
