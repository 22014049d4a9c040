//! The word in a segment that names the thread that owns a ring or the lock of the common ring.

use crate::sync::{AtomicU64, Ordering};

/// The low half is the owner's kernel thread id, 0 for none. The high half counts the changes. All zeros mean that it
/// was never owned.
#[repr(transparent)]
#[derive(Debug)]
pub struct Owner(AtomicU64);

/// The id of no thread. A word that is sealed with it cannot be taken any more.
pub const NOBODY: u32 = u32::MAX;

/// The thread id in an owner's word.
const fn tid_of(word: u64) -> u32 {
    word as u32
}

/// The word of the next owner.
const fn next(word: u64, tid: u32) -> u64 {
    ((word >> 32).wrapping_add(1) << 32) | tid as u64
}

impl Owner {
    /// An owner's word that was never owned.
    #[cfg(any(test, loom))]
    pub fn unowned() -> Owner {
        Owner(AtomicU64::new(0))
    }

    /// The owner's thread id, 0 if there is none.
    pub fn tid(&self) -> u32 {
        tid_of(self.0.load(Ordering::Acquire))
    }

    /// Makes thread `me` the owner, if there is none or `exists` returns `false` for it. Returns `false` if another
    /// thread owns it.
    ///
    /// A word that contains `me` was left by an earlier thread with the same id.
    pub fn take(&self, me: u32, exists: impl Fn(u32) -> bool) -> bool {
        let seen = self.0.load(Ordering::Acquire);
        let tid = tid_of(seen);
        let free = tid == 0 || tid == me || (tid != NOBODY && !exists(tid));
        free && self.0.compare_exchange(seen, next(seen, me), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Waits until [`Self::take`] succeeds, and calls `pause` between attempts.
    pub fn lock(&self, me: u32, exists: impl Fn(u32) -> bool, mut pause: impl FnMut()) {
        while !self.take(me, &exists) {
            pause();
        }
    }

    /// Releases the ownership. Only the owner may call this.
    pub fn release(&self) {
        self.0.store(next(self.0.load(Ordering::Relaxed), 0), Ordering::Release);
    }
}
