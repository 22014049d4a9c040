//! Ownership of a ring or of the common ring's lock by a thread of the traced process.
//!
//! A thread that has ended releases nothing. So a later thread takes over what belongs to a thread that no longer
//! exists. The kernel reuses thread ids. After the check whether an owner exists, a new thread may get the dead
//! thread's id and take over the ring. So the owner's word also counts its owners. A takeover succeeds only from the
//! owner that was checked.
//!
//! The next owner sees everything that the last one wrote, because the kernel orders a thread's end before it reports
//! that the thread is gone.
//!
//! A thread claims a ring once, so none of this is on the event path.

use super::layout::RingHeader;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// The low half is the owner's kernel thread id, 0 for none. The high half counts the changes. All zeros mean that it
/// was never owned.
#[repr(transparent)]
#[derive(Debug)]
pub struct Owner(AtomicU64);

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
        let free = tid == 0 || tid == me || !exists(tid);
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

/// Claims a ring for thread `me` and returns its index. `None` if other threads own all rings.
///
/// It prefers a ring that an earlier thread with the same id has left. Next come a free one, one whose owner is gone,
/// and an unused one. `rings[0]`, the common one, is never claimed. `used` is one more than the highest index ever
/// claimed, so that memory grows with the number of threads that are alive at once.
pub fn claim(rings: &[RingHeader], used: &AtomicU32, me: u32, exists: impl Fn(u32) -> bool) -> Option<usize> {
    let seen = (used.load(Ordering::Relaxed) as usize).clamp(1, rings.len().max(1));
    let take = |index: usize| rings.get(index).is_some_and(|ring| ring.owner.0.take(me, &exists));
    let has_same_id = |index: &usize| rings.get(*index).is_some_and(|ring| ring.owner.0.tid() == me);
    let index = (1..seen)
        .find(|index| has_same_id(index) && take(*index))
        .or_else(|| (1..seen).find(|index| take(*index)))
        .or_else(|| (seen..rings.len()).find(|index| take(*index)))?;
    // The launcher reads this before it looks for published slots. The publication orders the two.
    used.fetch_max(index as u32 + 1, Ordering::Relaxed);
    Some(index)
}
