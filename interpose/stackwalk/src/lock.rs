//! The lock of the stack tables and other tables, implemented with a futex. Other tools may hook pthreads' locks, and
//! the standard library's locks have poisoning.
//!
//! It is held for a few hundred nanoseconds while a new entry is written, never while foreign code is called. But a
//! signal handler may leave that code by `siglongjmp`, and then nobody releases the lock. So a wait ends after
//! [`MAX_WAITS`], and later ones do not wait at all until the lock is released.

use std::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
const CONTENDED: u32 = 2;

/// How many times the futex is waited for, and how long each time, in nanoseconds: 2 s in total. A stopped process
/// counts as one wait.
const MAX_WAITS: u32 = 200;
const WAIT_NANOSECONDS: i64 = 10_000_000;

/// A lock without data. Functions that need it take a [`Locked`] as proof.
pub struct Lock {
    state: AtomicU32,
    /// Whether a wait has ended without success.
    is_abandoned: AtomicBool,
}

/// Proof that the lock is held. Dropping it releases the lock.
pub struct Locked<'a>(&'a Lock);

impl Lock {
    /// A lock that is not held.
    #[allow(clippy::new_without_default, reason = "lives in a static; a Default would be a second way to make one")]
    pub const fn new() -> Lock {
        Lock { state: AtomicU32::new(UNLOCKED), is_abandoned: AtomicBool::new(false) }
    }

    /// Waits for the lock: 64 attempts, then a futex. `None` if its holder has not released it in time.
    pub fn lock(&self) -> Option<Locked<'_>> {
        for _ in 0..64 {
            if self.state.compare_exchange_weak(UNLOCKED, LOCKED, Acquire, Relaxed).is_ok() {
                return Some(Locked(self));
            }
            std::hint::spin_loop();
        }
        for _ in 0..MAX_WAITS {
            if self.is_abandoned.load(Relaxed) {
                return None;
            }
            if self.state.swap(CONTENDED, Acquire) == UNLOCKED {
                return Some(Locked(self));
            }
            wait_while(&self.state, CONTENDED, WAIT_NANOSECONDS);
        }
        self.is_abandoned.store(true, Relaxed);
        None
    }

    /// Releases the lock, whoever holds it. For a forked child, where the holder does not exist.
    pub fn forget_holder(&self) {
        self.is_abandoned.store(false, Relaxed);
        self.state.store(UNLOCKED, Release);
    }

    fn wake_one(&self) {
        let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the futex word is a live atomic. This operation reads nothing else.
        unsafe { libc::syscall(libc::SYS_futex, self.state.as_ptr(), operation, 1) };
    }
}

/// Sleeps while the futex word has this value, until it is woken, and at most so many nanoseconds, which are less than
/// a second.
pub(crate) fn wait_while(word: &AtomicU32, value: u32, nanoseconds: i64) {
    let limit = libc::timespec { tv_sec: 0, tv_nsec: nanoseconds };
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the futex word is a live atomic, and `limit` is a valid timespec.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, &raw const limit) };
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if self.0.state.swap(UNLOCKED, Release) == CONTENDED {
            // The holder was slow.
            self.0.is_abandoned.store(false, Relaxed);
            self.0.wake_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn one_thread_at_a_time_holds_the_lock() {
        let lock = Lock::new();
        let holders = AtomicU32::new(0);
        let sum = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let locked = lock.lock();
                        assert!(locked.is_some());
                        assert_eq!(holders.fetch_add(1, Relaxed), 0);
                        sum.store(sum.load(Relaxed) + 1, Relaxed);
                        holders.fetch_sub(1, Relaxed);
                        drop(locked);
                    }
                });
            }
        });
        assert_eq!(sum.load(Relaxed), 80_000);
    }

    #[test]
    fn a_lock_that_is_never_released_is_waited_for_once() {
        let lock = Lock::new();
        let held = lock.lock();
        let begin = std::time::Instant::now();
        assert!(lock.lock().is_none());
        let first = begin.elapsed();
        assert!((0..1000).all(|_| lock.lock().is_none()));
        assert!(first.as_millis() >= 1000 && begin.elapsed() < first * 2, "{first:?}");
        // A holder that was only slow.
        drop(held);
        assert!((0..10).all(|_| lock.lock().is_some()));
    }
}
