//! The memory of tables that belong to one recording.
//!
//! A table is never unmapped, because a hook on another thread may use it at any time. But memtrace may attach to a
//! process again and again. So a later recording uses the addresses of an earlier one: not of the last, but of the one
//! before. A hook would have to last for a whole recording to write into a table that is not its own, and then no
//! access fails.

use std::cell::UnsafeCell;
use std::ptr::NonNull;

use super::lock::{Lock, Locked};
use super::pages;

/// How many tables are known. The memory of further ones is not used again.
const MAX_TABLES: usize = 256;

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// A recording uses it.
    Used,
    /// The last recording has used it.
    Ended,
    /// The next recording may use it. It reads as zeros.
    Free,
}

#[derive(Clone, Copy)]
struct Table {
    start: NonNull<u8>,
    bytes: usize,
    state: State,
}

struct Tables {
    lock: Lock,
    all: UnsafeCell<[Option<Table>; MAX_TABLES]>,
}

// SAFETY: the tables are only used under the lock.
unsafe impl Sync for Tables {}

static TABLES: Tables = Tables { lock: Lock::new(), all: UnsafeCell::new([None; MAX_TABLES]) };

impl Tables {
    #[allow(clippy::mut_from_ref, reason = "the lock is the proof that nobody else has it")]
    fn all(&self, _locked: &Locked<'_>) -> &mut [Option<Table>; MAX_TABLES] {
        // SAFETY: the caller has the lock, and uses one result at a time.
        unsafe { &mut *self.all.get() }
    }
}

/// Reserves zeroed memory for a table of the present recording ([`pages::reserve`]). `None` if the kernel refuses.
pub fn reserve_table(bytes: usize) -> Option<NonNull<u8>> {
    let Some(locked) = TABLES.lock.lock() else { return pages::reserve(bytes) };
    let all = TABLES.all(&locked);
    let is_free = |table: &&mut Table| table.state == State::Free && table.bytes == bytes;
    if let Some(table) = all.iter_mut().flatten().find(is_free) {
        table.state = State::Used;
        return Some(table.start);
    }
    let start = pages::reserve(bytes)?;
    if let Some(unused) = all.iter_mut().find(|table| table.is_none()) {
        *unused = Some(Table { start, bytes, state: State::Used });
    }
    Some(start)
}

/// Gives back memory that nobody else has seen.
///
/// # Safety
///
/// `start` comes from [`reserve_table`] with this size, and the memory was not written.
pub unsafe fn return_table(start: NonNull<u8>, bytes: usize) {
    let Some(locked) = TABLES.lock.lock() else { return };
    match TABLES.all(&locked).iter_mut().flatten().find(|table| table.start == start) {
        Some(table) => table.state = State::Free,
        // SAFETY: the memory is not known here, and the caller gives it up.
        None => unsafe { pages::release(start, bytes) },
    }
}

/// Ends the recording: returns the pages of its tables to the kernel, and lets the next recording use the memory of the
/// last but one.
pub fn end_tables() {
    let Some(locked) = TABLES.lock.lock() else { return };
    for table in TABLES.all(&locked).iter_mut().flatten().filter(|table| table.state != State::Free) {
        table.state = if table.state == State::Used { State::Ended } else { State::Free };
        // SAFETY: the range comes from `reserve`. Its recording has ended, so its contents are not needed. For a hook
        // that still uses it, zeros are a valid table without entries.
        unsafe { pages::discard(table.start, table.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_the_recording_before_the_last_is_used_again() {
        // A size that no other test uses.
        let bytes = 40 << 12;
        let recording = || {
            let [first, second] = [reserve_table(bytes).unwrap(), reserve_table(bytes).unwrap()];
            // SAFETY: the memory has this size.
            let is_zero = unsafe { std::slice::from_raw_parts(first.as_ptr(), bytes) }.iter().all(|byte| *byte == 0);
            assert!(is_zero && first != second);
            // SAFETY: the memory has this size, and nothing else uses it.
            unsafe { first.write_bytes(7, bytes) };
            // SAFETY: the second one was not written.
            unsafe { return_table(second, bytes) };
            end_tables();
            (first, second)
        };
        let all: Vec<_> = (0..5).map(|_| recording()).collect();
        // Whatever was not used is free at once.
        assert!(all[1].0 == all[0].1 || all[1].1 == all[0].1);
        let mut distinct: Vec<_> = all.iter().flat_map(|(first, second)| [*first, *second]).collect();
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() <= 4, "{distinct:?}");
        assert_ne!(all[3].0, all[2].0);
    }
}
