//! Ctrl-C and SIGTERM while tries run: they end the tries, and not this process, which prints what is known by then.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use anyhow::Context;
use rustix::event::{EventfdFlags, eventfd};

/// The signals.
const SIGNALS: [libc::c_int; 2] = [libc::SIGINT, libc::SIGTERM];

/// The number of the signal that came first. 0 if none came.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
/// Readable after a signal.
static EVENT: OnceLock<OwnedFd> = OnceLock::new();

extern "C" fn note(signal: libc::c_int) {
    let _ = SIGNAL.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
    if let Some(event) = EVENT.get() {
        // SAFETY: write(2) may be called in a signal handler, and errno is restored. The descriptor is never closed.
        unsafe {
            let errno = *libc::__errno_location();
            libc::write(event.as_raw_fd(), (&raw const ONE).cast(), size_of_val(&ONE));
            *libc::__errno_location() = errno;
        }
    }
}

/// The number that is added to the counter of an eventfd.
static ONE: u64 = 1;

/// Handles the signals until it is dropped.
pub(super) struct Handler {
    former: [libc::sighandler_t; SIGNALS.len()],
}

impl Handler {
    /// # Errors
    ///
    /// If there is no descriptor left.
    pub(super) fn install() -> anyhow::Result<Handler> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("cannot create an eventfd")?;
        let _ = EVENT.set(event);
        let handler: extern "C" fn(libc::c_int) = note;
        // SAFETY: the handler only stores into an atomic and writes into an eventfd.
        let former = SIGNALS.map(|signal| unsafe {
            let former = libc::signal(signal, handler as libc::sighandler_t);
            // A signal that the parent made this process ignore stays ignored, as under nohup.
            if former == libc::SIG_IGN {
                libc::signal(signal, former);
            }
            former
        });
        Ok(Handler { former })
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        for (signal, former) in SIGNALS.into_iter().zip(self.former) {
            // SAFETY: `former` is what signal(2) returned.
            unsafe { libc::signal(signal, former) };
        }
    }
}

/// A descriptor that is readable after a signal. `None` before [`Handler::install`].
pub(super) fn event() -> Option<BorrowedFd<'static>> {
    EVENT.get().map(AsFd::as_fd)
}

/// The number of the signal that ended the tries.
pub(super) fn signal() -> Option<u8> {
    u8::try_from(SIGNAL.load(Ordering::Relaxed)).ok().filter(|signal| *signal != 0)
}
