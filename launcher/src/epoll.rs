//! Waiting for several descriptors: epoll and eventfd, safely wrapped.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the caller passes the result of a call that made a new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A set of descriptors, each with a token that says what became readable.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

impl Epoll {
    /// An empty set.
    pub(crate) fn new() -> io::Result<Epoll> {
        // SAFETY: a plain call.
        owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map(Epoll)
    }

    /// Watches `fd` for input (level-triggered). Closing the descriptor ends that.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: token };
        // SAFETY: open descriptors and a valid event.
        let result = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Watches `fd` no longer.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        // SAFETY: open descriptors; a missing entry is an error that is of no interest.
        unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_DEL, fd.as_raw_fd(), std::ptr::null_mut()) };
    }

    /// Waits for something, at most `timeout` (`None`: for ever), and puts the tokens into `ready`.
    pub(crate) fn wait(&self, timeout: Option<Duration>, ready: &mut Vec<u64>) {
        ready.clear();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 32];
        let timeout = timeout.map_or(-1, |t| t.as_millis().min(i32::MAX as u128) as libc::c_int);
        // SAFETY: the buffer and its length are a pair.
        let n =
            unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), events.len() as libc::c_int, timeout) };
        ready.extend(events.iter().take(n.max(0) as usize).map(|e| e.u64));
    }
}

/// A flag that can be waited for.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    /// A flag that is down.
    pub(crate) fn new() -> io::Result<EventFd> {
        // SAFETY: a plain call.
        owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }).map(EventFd)
    }

    /// The same flag for another thread.
    pub(crate) fn try_clone(&self) -> io::Result<EventFd> {
        self.0.try_clone().map(EventFd)
    }

    /// Raises the flag.
    pub(crate) fn raise(&self) {
        let one = 1u64;
        // SAFETY: eight readable bytes. It can only fail when the counter is full, and then the flag is up.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Takes the flag down.
    pub(crate) fn clear(&self) {
        let mut value = 0u64;
        // SAFETY: eight writable bytes; an empty counter is an error that is of no interest.
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
    fn a_raised_flag_is_seen() {
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
