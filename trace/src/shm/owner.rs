//! Who may write: which thread of the traced process a ring, or the common ring's lock, belongs to.
//!
//! A thread that is gone gives nothing back, so whoever comes later takes over what belongs to a thread that no longer exists. The
//! kernel uses thread ids again: between the question whether an owner exists and the answer's use, a new thread may have got the
//! dead one's id and the ring with it. So an owner's word says not only who owns but also the how-manieth owner that is: whoever
//! takes over takes from the owner that was asked about, and from no other.
//!
//! What the last owner wrote into memory, the next one sees: the kernel orders a thread's end before the answer that it is gone.
//!
//! None of this is on the way of an event: a thread claims once.

use super::layout::RingHeader;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// The owner's kernel thread id in the low half, 0: nobody; in the high half how often that has changed. All zero: never owned.
#[repr(transparent)]
#[derive(Debug)]
pub struct Owner(AtomicU64);

/// The thread id in an owner's word.
const fn tid_of(word: u64) -> u32 {
    word as u32
}

/// The word of the owner that follows.
const fn next(word: u64, tid: u32) -> u64 {
    ((word >> 32).wrapping_add(1) << 32) | tid as u64
}

impl Owner {
    /// What nobody has owned yet.
    #[cfg(any(test, loom))]
    pub fn nobody() -> Owner {
        Owner(AtomicU64::new(0))
    }

    /// The owner's thread id; 0 when there is none.
    pub fn tid(&self) -> u32 {
        tid_of(self.0.load(Ordering::Acquire))
    }

    /// Makes thread `me` the owner of what nobody owns, or somebody of whom `exists` says that they are gone. A word with `me` in it was
    /// left by a thread that had this id before. False: it belongs to another.
    pub fn take(&self, me: u32, exists: impl Fn(u32) -> bool) -> bool {
        let seen = self.0.load(Ordering::Acquire);
        let tid = tid_of(seen);
        let free = tid == 0 || tid == me || !exists(tid);
        free && self.0.compare_exchange(seen, next(seen, me), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Waits until it can be taken, calling `pause` in between.
    pub fn lock(&self, me: u32, exists: impl Fn(u32) -> bool, mut pause: impl FnMut()) {
        while !self.take(me, &exists) {
            pause();
        }
    }

    /// Gives it back. Only the owner may call.
    pub fn release(&self) {
        self.0.store(next(self.0.load(Ordering::Relaxed), 0), Ordering::Release);
    }
}

/// Claims a ring for thread `me`: one that an earlier thread of the same id left, else a free one or one whose owner is gone, else a
/// fresh one; `None` when all belong to others. `rings[0]`, the common one, is never claimed. `used` is one more than the highest index
/// ever claimed, so that memory follows the number of threads alive at once.
pub fn claim(rings: &[RingHeader], used: &AtomicU32, me: u32, exists: impl Fn(u32) -> bool) -> Option<usize> {
    let seen = (used.load(Ordering::Relaxed) as usize).clamp(1, rings.len().max(1));
    let take = |index: usize| rings.get(index).is_some_and(|ring| ring.owner.0.take(me, &exists));
    let own = |index: &usize| rings.get(*index).is_some_and(|ring| ring.owner.0.tid() == me);
    let index = (1..seen)
        .find(|index| own(index) && take(*index))
        .or_else(|| (1..seen).find(|index| take(*index)))
        .or_else(|| (seen..rings.len()).find(|index| take(*index)))?;
    // The launcher looks at this before it looks for what was published: the publication orders the two.
    used.fetch_max(index as u32 + 1, Ordering::Relaxed);
    Some(index)
}
