//! The lock of the stack tables, implemented with a futex. Other tools may hook pthreads' locks, and the standard
//! library's locks have poisoning.
//!
//! Constraint: it is held for a few hundred nanoseconds while a new entry is written, never while foreign code is
//! called.

use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
const CONTENDED: u32 = 2;

/// A lock without data. Functions that need it take a [`Locked`] as proof.
pub(super) struct Lock(AtomicU32);

/// Proof that the lock is held. Dropping it releases the lock.
pub(super) struct Locked<'a>(&'a Lock);

impl Lock {
    pub(super) const fn new() -> Lock {
        Lock(AtomicU32::new(UNLOCKED))
    }

    /// Waits for the lock: 64 attempts, then a futex.
    pub(super) fn lock(&self) -> Locked<'_> {
        for _ in 0..64 {
            if self.0.compare_exchange_weak(UNLOCKED, LOCKED, Acquire, Relaxed).is_ok() {
                return Locked(self);
            }
            std::hint::spin_loop();
        }
        while self.0.swap(CONTENDED, Acquire) != UNLOCKED {
            self.futex(libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, CONTENDED);
        }
        Locked(self)
    }

    fn futex(&self, operation: libc::c_int, value: u32) {
        // SAFETY: the futex word is a live atomic. Without a timeout the kernel reads nothing else.
        unsafe {
            libc::syscall(libc::SYS_futex, self.0.as_ptr(), operation, value, std::ptr::null::<libc::timespec>());
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if self.0.0.swap(UNLOCKED, Release) == CONTENDED {
            self.0.futex(libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1);
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
}
