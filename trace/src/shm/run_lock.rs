//! The lock of a run: a word in memory that all its processes share. It makes an allocation and the check of a limit
//! one step ([`crate::options::Limit`]).
//!
//! The word names the thread that holds the lock, so a forked child does not hold what its parent holds. A process that
//! dies releases nothing. The launcher, which notices that it has ended, releases the lock in its place. A thread that
//! lives on and does not release it is recognized by the number of turns, which stays the same.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use super::memory;
use crate::sync::{AtomicU64, Ordering};

/// The name of the memory in `/proc/PID/maps`.
const NAME: &CStr = c"memtrace-lock";
const SIZE: usize = 4096;

/// A thread of a process of the run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holder(u64);

impl Holder {
    /// The thread `tid` of the process with this id in the launcher's pid namespace. A thread id has a meaning in its
    /// own process only, because that may be in another namespace.
    pub const fn new(pid: u32, tid: u32) -> Holder {
        Holder((pid as u64) << 32 | tid as u64)
    }

    /// The process id in the launcher's pid namespace.
    pub const fn pid(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The thread id in the process's own pid namespace.
    pub const fn tid(self) -> u32 {
        self.0 as u32
    }
}

/// The content of the memory. All zeros is a lock that nobody holds.
#[repr(C)]
struct Words {
    /// The [`Holder`]. 0 if there is none.
    holder: AtomicU64,
    /// How many times the lock was taken.
    turns: AtomicU64,
}

const _: () = assert!(size_of::<Words>() <= SIZE);

/// The mapped lock. Unmapped on drop.
#[derive(Debug)]
pub struct RunLock(NonNull<Words>);

// SAFETY: the memory is accessed through shared references to atomics.
unsafe impl Send for RunLock {}
// SAFETY: the memory is accessed through shared references to atomics.
unsafe impl Sync for RunLock {}

impl RunLock {
    /// Creates the lock, on the launcher's side.
    pub fn create() -> io::Result<(RunLock, OwnedFd)> {
        let fd = memory::create(NAME, SIZE)?;
        Ok((RunLock::map(fd.as_fd())?, fd))
    }

    /// Maps a received lock, on the traced process's side. The error is `InvalidData` if it is none.
    pub fn map(fd: BorrowedFd<'_>) -> io::Result<RunLock> {
        Ok(RunLock(memory::map(fd, SIZE)?.cast()))
    }

    fn words(&self) -> &Words {
        // SAFETY: the mapping is page-aligned and larger than `Words`, whose atomics are valid for every bit pattern.
        unsafe { self.0.as_ref() }
    }

    /// The thread that holds the lock.
    pub fn holder(&self) -> Option<Holder> {
        Some(Holder(self.words().holder.load(Ordering::Acquire))).filter(|holder| holder.0 != 0)
    }

    /// How many times the lock was taken.
    pub fn turns(&self) -> u64 {
        self.words().turns.load(Ordering::Relaxed)
    }

    /// Makes `me` the holder, in the place of `before`. Returns `false` if another thread was faster.
    pub fn take(&self, before: Option<Holder>, me: Holder) -> bool {
        let before = before.map_or(0, |holder| holder.0);
        let word = &self.words().holder;
        let taken = word.compare_exchange(before, me.0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if taken {
            self.words().turns.fetch_add(1, Ordering::Relaxed);
        }
        taken
    }

    /// Releases what `me` holds. If another thread has taken it over, nothing happens.
    pub fn release(&self, me: Holder) {
        let _ = self.words().holder.compare_exchange(me.0, 0, Ordering::Release, Ordering::Relaxed);
    }

    /// Releases what any thread of a process holds that has ended. `pid` is in the launcher's pid namespace.
    pub fn release_of_ended(&self, pid: u32) {
        if let Some(holder) = self.holder().filter(|holder| holder.pid() == pid) {
            self.release(holder);
        }
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // SAFETY: `memory::map` has mapped this range, and no reference into it outlives the lock.
        unsafe { libc::munmap(self.0.as_ptr().cast(), SIZE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_at_a_time_holds_it() {
        let (ours, fd) = RunLock::create().unwrap();
        let theirs = RunLock::map(fd.as_fd()).unwrap();
        let [one, other] = [Holder::new(7, 8), Holder::new(9, 8)];
        assert!(ours.take(None, one) && !theirs.take(None, other));
        assert_eq!((theirs.holder(), theirs.turns()), (Some(one), 1));
        assert_eq!((one.pid(), one.tid()), (7, 8));
        ours.release(other);
        assert_eq!(theirs.holder(), Some(one), "only the holder releases it");
        ours.release(one);
        assert!(theirs.take(None, other) && theirs.turns() == 2);
    }

    #[test]
    fn a_lock_that_was_taken_over_is_not_released_by_the_holder_before() {
        let (lock, _fd) = RunLock::create().unwrap();
        let [left, next] = [Holder::new(7, 8), Holder::new(7, 9)];
        assert!(lock.take(None, left) && lock.take(Some(left), next));
        assert!(!lock.take(Some(left), left));
        lock.release(left);
        assert_eq!(lock.holder(), Some(next));
    }

    #[test]
    fn the_end_of_a_process_releases_what_it_holds() {
        let (lock, _fd) = RunLock::create().unwrap();
        let dead = Holder::new(7, 70);
        assert!(lock.take(None, dead));
        lock.release_of_ended(8);
        assert_eq!(lock.holder(), Some(dead));
        lock.release_of_ended(7);
        assert_eq!(lock.holder(), None);
    }

    #[test]
    fn a_segment_is_no_lock() {
        let (_segment, fd) = crate::shm::segment::Segment::create().unwrap();
        assert!(RunLock::map(fd.as_fd()).is_err());
    }
}
