//! The memory of a recording that has ended, for the next one in this process.
//!
//! memtrace may attach to a process again and again. A recording takes half a gigabyte of addresses, which are never
//! unmapped, because a thread may be in a hook at any time. So the next recording uses the same addresses. A thread
//! that has not left its hook yet may still write to the slots of its ring and to its state. Therefore its ring stays
//! its own: in the next recording, no other thread can claim it while it exists. Headers and tables, which threads
//! share, are those of the last recording but one.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use memtrace_stackwalk::end_tables;
use memtrace_trace::shm::owner::{NOBODY, seal};
use memtrace_trace::shm::segment::{HeaderAddresses, Segment, SlotAddresses};

use super::bounded_wait::BoundedWait;
use super::thread_state::ThreadStates;

/// How long a thread may use the common ring.
const COMMON_RING_LIMIT: Duration = Duration::from_millis(100);

/// The memory, and the rings that threads own: their indices and owners.
struct Reusable {
    slots: SlotAddresses,
    states: ThreadStates,
    owned: Vec<(usize, u32)>,
    headers: HeaderAddresses,
}

/// The headers of the recording before the last one. Null if there are none that may be used.
static EARLIER_HEADERS: AtomicPtr<HeaderAddresses> = AtomicPtr::new(std::ptr::null_mut());

/// The memory of the last recording. Null if there is none that may be used.
static REUSABLE: AtomicPtr<Reusable> = AtomicPtr::new(std::ptr::null_mut());

/// Whether the next recording needs no new addresses for its segment.
pub(super) fn has_memory() -> bool {
    !REUSABLE.load(Ordering::Relaxed).is_null()
}

/// Gives back the memory of a segment, and keeps the addresses for the next recording. Recording must be paused.
pub(super) fn leave(segment: &Segment, states: ThreadStates, exists: fn(u32) -> bool) {
    states.leave_all();
    let owned = seal(segment.ring_headers(), exists);
    // Threads use the common ring only with its lock.
    let (lock, mut wait) = (&segment.header().common_lock.0, BoundedWait::new(COMMON_RING_LIMIT));
    let mut is_free = lock.take(NOBODY, exists);
    while !is_free && wait.pause() {
        is_free = lock.take(NOBODY, exists);
    }
    end_tables();
    if let Some((slots, headers)) = segment.abandon().filter(|_| is_free) {
        put(&REUSABLE, Reusable { slots, states, owned, headers });
    }
}

/// Maps a segment, where possible at the addresses of the last one. Returns it with the states of its threads.
pub(super) fn map(fd: BorrowedFd<'_>) -> Option<(Segment, ThreadStates)> {
    if let Some(Reusable { slots, states, owned, headers }) = take(&REUSABLE) {
        match Segment::map_over(fd, slots, take(&EARLIER_HEADERS)) {
            Ok(segment) => {
                put(&EARLIER_HEADERS, headers);
                for (index, tid) in owned {
                    let _ = segment.ring_header(index).is_some_and(|ring| ring.owner.0.take(tid, |_| true));
                    segment.header().rings_used.0.fetch_max(index as u32 + 1, Ordering::Relaxed);
                }
                states.leave_all();
                return Some((segment, states));
            }
            Err((_, slots)) => put(&REUSABLE, Reusable { slots, states, owned, headers }),
        }
    }
    Some((Segment::map(fd).ok()?, ThreadStates::new()?))
}

fn put<T>(place: &AtomicPtr<T>, value: T) {
    let before = place.swap(Box::into_raw(Box::new(value)), Ordering::AcqRel);
    if !before.is_null() {
        // SAFETY: `put` has made this box, and the exchange gives it to this thread alone.
        drop(unsafe { Box::from_raw(before) });
    }
}

fn take<T>(place: &AtomicPtr<T>) -> Option<T> {
    let before = place.swap(std::ptr::null_mut(), Ordering::AcqRel);
    // SAFETY: `put` has made this box, and the exchange gives it to this thread alone.
    (!before.is_null()).then(|| *unsafe { Box::from_raw(before) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use memtrace_trace::shm::owner::claim;

    use super::*;

    #[test]
    fn recordings_one_after_another_use_the_same_addresses_and_threads_keep_their_rings() {
        let exists = |tid: u32| tid != 8;
        let claim =
            |segment: &Segment, tid| claim(segment.ring_headers(), &segment.header().rings_used.0, tid, |_| true);
        let slots = |segment: &Segment| format!("{segment:?}").split_once("slots: ").unwrap().1.to_owned();
        let headers = |segment: &Segment| std::ptr::from_ref(segment.header()).addr();
        let (mut last, mut seen) = (None, Vec::new());
        for turn in 0..5 {
            let (_launcher, fd) = Segment::create().unwrap();
            let (segment, states) = map(fd.as_fd()).unwrap();
            let segment = std::mem::ManuallyDrop::new(segment);
            assert!(!has_memory());
            let here = (slots(&segment), std::ptr::from_ref(states.get(0).unwrap()).addr());
            assert_eq!(*last.get_or_insert_with(|| here.clone()), here, "turn {turn}");
            assert_eq!([7, 8, 9].map(|tid| claim(&segment, tid).unwrap()), [1, 2, 3], "turn {turn}");
            seen.push(headers(&segment));
            leave(&segment, states, exists);
            assert!(has_memory() && claim(&segment, 10).is_none());
        }
        // The headers are not those of the recording just before.
        assert_eq!((seen[2], seen[3], seen[4]), (seen[0], seen[1], seen[0]));
        assert_ne!(seen[0], seen[1]);
        // 8 has ended. Another thread gets its ring, and neither of the two that are kept.
        let (_launcher, fd) = Segment::create().unwrap();
        let (segment, states) = map(fd.as_fd()).unwrap();
        let segment = std::mem::ManuallyDrop::new(segment);
        assert_eq!([10, 11].map(|tid| claim(&segment, tid).unwrap()), [2, 4]);
        // A thread that stays in the common ring keeps its memory.
        assert!(segment.header().common_lock.0.take(7, exists));
        leave(&segment, states, exists);
        assert!(!has_memory());
    }
}
