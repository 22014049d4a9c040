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
pub use super::owner_word::{NOBODY, Owner};
use crate::sync::{AtomicU32, Ordering};

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

/// Makes rings unusable, so that nobody claims one from here on. Returns those that threads own which exist: their
/// indices and owners. `rings[0]` is not changed.
pub fn seal(rings: &[RingHeader], exists: impl Fn(u32) -> bool) -> Vec<(usize, u32)> {
    let rest = rings.iter().enumerate().skip(1);
    let owned = rest.filter(|(_, ring)| !ring.owner.0.take(NOBODY, &exists));
    owned.map(|(index, ring)| (index, ring.owner.0.tid())).collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn sealed_rings_are_never_claimed_and_the_others_stay_with_their_owners() {
        let rings: Vec<RingHeader> = (0..6).map(|_| RingHeader::at(0)).collect();
        let used = AtomicU32::new(0);
        let exists = |tid: u32| tid != 8;
        let claimed: Vec<_> = [7, 8, 9].map(|tid| claim(&rings, &used, tid, |_| true)).to_vec();
        assert_eq!(claimed, [Some(1), Some(2), Some(3)]);
        assert_eq!(seal(&rings, exists), [(1, 7), (3, 9)]);
        // The ring of a thread that has ended is sealed too, and an owner finds its own again.
        assert_eq!(claim(&rings, &used, 10, |tid| tid != 8 && tid != NOBODY), None);
        assert_eq!(claim(&rings, &used, 9, exists), Some(3));
        assert_eq!(seal(&rings, exists), [(1, 7), (3, 9)]);
        // The next recording keeps the rings for their owners.
        let next: Vec<RingHeader> = (0..6).map(|_| RingHeader::at(0)).collect();
        for (index, tid) in seal(&rings, exists) {
            assert!(next[index].owner.0.take(tid, exists));
        }
        let used = AtomicU32::new(4);
        assert_eq!([10, 7, 11].map(|tid| claim(&next, &used, tid, exists)), [Some(2), Some(1), Some(4)]);
    }
}
