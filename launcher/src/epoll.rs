//! Epoll and eventfd, to wait for several descriptors.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

/// The maximum number of descriptors that one wait reports.
const MAX_EVENTS: usize = 32;

/// A set of descriptors, each with a token that identifies it when it becomes readable.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

impl Epoll {
    /// Creates an empty set. Fails when no descriptor is available.
    pub(crate) fn new() -> io::Result<Epoll> {
        Ok(Epoll(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Watches `fd` for input (level-triggered) under `token`. Closing the descriptor removes it.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, EventData::new_u64(token), EventFlags::IN)?)
    }

    /// Stops watching `fd`.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        // A missing entry is an error that can be ignored.
        let _ = epoll::delete(&self.0, fd);
    }

    /// Waits until a descriptor is readable and stores the tokens in `ready`.
    ///
    /// Returns after `timeout` at the latest. `None` waits without a limit.
    pub(crate) fn wait(&self, timeout: Option<Duration>, ready: &mut Vec<u64>) {
        ready.clear();
        // Whole milliseconds, and at most so many, fit the system call of every kernel.
        let timeout = timeout.map(|t| t.as_millis().min(i32::MAX as u128) as i64);
        let timeout = timeout.map(|ms| Timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 });
        let mut events = [MaybeUninit::uninit(); MAX_EVENTS];
        // An interrupted wait reports nothing.
        if let Ok((events, _)) = epoll::wait(&self.0, &mut events, timeout.as_ref()) {
            ready.extend(events.iter().map(|event| event.data.u64()));
        }
    }
}

/// A flag that epoll can wait for.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    /// Creates a cleared flag. Fails when no descriptor is available.
    pub(crate) fn new() -> io::Result<EventFd> {
        Ok(EventFd(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// A handle to the same flag, for another thread.
    pub(crate) fn try_clone(&self) -> io::Result<EventFd> {
        self.0.try_clone().map(EventFd)
    }

    /// Sets the flag.
    pub(crate) fn raise(&self) {
        // The write fails only when the counter is full, and then the flag is already set.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears the flag.
    pub(crate) fn clear(&self) {
        // The read fails when the counter is 0, which can be ignored.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
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
