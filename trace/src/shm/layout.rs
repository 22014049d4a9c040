//! The memory layout of a segment.
//!
//! ```text
//! 0                 SegmentHeader
//! RINGS             RingHeader x RING_COUNT
//! SLOTS             Slot x RING_SLOTS x RING_COUNT
//! ```
//!
//! The segment is sparse: only rings that were written to take memory.

use super::owner_word::Owner;
use crate::counters::COUNTER_SLOTS;
use crate::event::Slot;
use crate::sync::{AtomicU32, AtomicU64};

/// The first 8 bytes of a segment.
pub const MAGIC: u64 = u64::from_le_bytes(*b"MTSHM\0\0\x01");

/// The number of rings in a segment. Ring 0 is the common one: threads without a ring of their own share it under a
/// lock.
pub const RING_COUNT: usize = 1024;
/// The number of slots in a ring, a power of two. 8192 slots of 64 bytes are 512 KiB, which lasts 8 ms at a million
/// events a second.
pub const RING_SLOTS: usize = 8192;

/// A value on its own pair of cache lines, because the adjacent-line prefetcher loads two.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Padded<T>(pub T);

/// The start of a segment.
#[repr(C)]
#[derive(Debug)]
pub struct SegmentHeader {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`BUILD`].
    pub build: AtomicU64,
    /// The launcher sets this to 1 once it will drain no more. Producers then stop.
    pub closed: Padded<AtomicU32>,
    /// How many slots the launcher has taken from all processes of the run, at its last update. It shows whether the
    /// launcher makes progress.
    pub taken: Padded<AtomicU64>,
    /// The number of the next event. Starts at [`FIRST_SEQ`].
    pub next_seq: Padded<AtomicU64>,
    /// The [`crate::counters::Counter`]s, by index.
    pub counters: Padded<[AtomicU64; COUNTER_SLOTS]>,
    /// One more than the highest ring index ever claimed, so that the launcher need not examine further rings.
    pub rings_used: Padded<AtomicU32>,
    /// The lock of the common ring.
    pub common_lock: Padded<Owner>,
    /// How many times the traced process has asked for its events to be written.
    pub flushes_requested: Padded<AtomicU64>,
    /// The number of the last such request whose events are in the trace file.
    pub flushes_done: AtomicU64,
    /// The process's id in the launcher's pid namespace, as the trace file's name has it.
    pub trace_pid: AtomicU32,
    /// The number of the process image in the trace file's name; 0 for the first one, whose name has no number.
    pub trace_image: AtomicU32,
    /// 1 if the recording began in a process that was running already (`memtrace attach`). Its events are numbered from
    /// [`FIRST_LIVE_SEQ`] on. The numbers before are for the events that recreate what existed, from 1 on.
    pub is_attached: AtomicU32,
    /// One more than the number of events that recreate what existed, 0 before they are all published.
    pub prior_state_end: AtomicU64,
    /// The launcher sets this to 1, and wakes those that wait for it (futex), to end the recording of a process that it
    /// has attached to.
    pub detach_requested: AtomicU32,
    /// The process sets this to 1 when it writes no more events.
    pub is_detached: AtomicU32,
    /// The process sets this to 1 before its first allocation, whose event gets the first number.
    pub makes_first_allocation: AtomicU32,
}

/// The header of one ring.
#[repr(C)]
#[derive(Debug)]
pub struct RingHeader {
    /// The thread that writes to it.
    pub owner: Padded<Owner>,
    /// How many slots the producer has published.
    pub tail: Padded<AtomicU64>,
    /// How many slots the launcher has consumed.
    pub head: Padded<AtomicU64>,
}

impl RingHeader {
    /// An unclaimed, empty ring at this position.
    #[cfg(any(test, loom))]
    pub fn at(position: u64) -> RingHeader {
        RingHeader {
            owner: Padded(Owner::unowned()),
            tail: Padded(AtomicU64::new(position)),
            head: Padded(AtomicU64::new(position)),
        }
    }
}

/// The number of the first event.
pub const FIRST_SEQ: u64 = 1;
/// The number of the first event of a recording that began in a running process. 16 million blocks and segments can
/// exist before.
pub const FIRST_LIVE_SEQ: u64 = 1 << 24;

const fn round_up(value: usize, to: usize) -> usize {
    value.div_ceil(to) * to
}

/// The offset of the ring headers in bytes.
pub const RINGS: usize = round_up(size_of::<SegmentHeader>(), 4096);
/// The offset of the slots in bytes.
pub const SLOTS: usize = round_up(RINGS + RING_COUNT * size_of::<RingHeader>(), 4096);
/// The size of a segment in bytes.
pub const SEGMENT_SIZE: usize = SLOTS + RING_COUNT * RING_SLOTS * size_of::<Slot>();

const _: () = assert!(RING_SLOTS.is_power_of_two());
const _: () = assert!(size_of::<Slot>() == 64);

/// Increment this if the meaning of a slot, a counter or a definition changes without a change of sizes.
const REVISION: u64 = 6;

/// Identifies a build. Launcher and library must have the same value.
pub const BUILD: u64 = {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let version = env!("CARGO_PKG_VERSION").as_bytes();
    let mut i = 0;
    while i < version.len() {
        hash = (hash ^ version[i] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        i += 1;
    }
    let sizes = [REVISION, RINGS as u64, SLOTS as u64, SEGMENT_SIZE as u64];
    let mut i = 0;
    while i < sizes.len() {
        hash = (hash ^ sizes[i]).wrapping_mul(0x0000_0100_0000_01b3);
        i += 1;
    }
    hash
};
