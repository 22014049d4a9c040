//! Where everything lies in a segment.
//!
//! ```text
//! 0                 SegmentHeader
//! RINGS             RingHeader x RING_COUNT
//! SLOTS             Slot x RING_SLOTS x RING_COUNT
//! ```
//!
//! The segment is sparse: memory is used for rings that were written to, and only for those.

use super::owner::Owner;
use crate::counters::COUNTER_SLOTS;
use crate::event::Slot;
use crate::sync::{AtomicU32, AtomicU64};

/// First 8 bytes of a segment.
pub const MAGIC: u64 = u64::from_le_bytes(*b"MTSHM\0\0\x01");

/// Rings in a segment. Ring 0 is the common one: threads that find no ring of their own share it under a lock.
pub const RING_COUNT: usize = 1024;
/// Slots of a ring; a power of two. 8192 slots of 64 bytes are 512 KiB: 8 ms at a million events a second.
pub const RING_SLOTS: usize = 8192;

/// A value on its own pair of cache lines: the adjacent-line prefetcher pulls two.
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
    /// Set to 1 by the launcher when nobody will drain any more: producers stop.
    pub closed: Padded<AtomicU32>,
    /// How many slots the launcher has taken, from all processes of the run, as of its last look here: whether it gets anything done.
    pub taken: Padded<AtomicU64>,
    /// The number of the next event; starts at 1.
    pub next_seq: Padded<AtomicU64>,
    /// [`crate::counters::Counter`]s, by index.
    pub counters: Padded<[AtomicU64; COUNTER_SLOTS]>,
    /// One more than the highest ring index ever claimed: how far the launcher looks.
    pub rings_used: Padded<AtomicU32>,
    /// The lock of the common ring.
    pub common_lock: Padded<Owner>,
}

/// The head of one ring.
#[repr(C)]
#[derive(Debug)]
pub struct RingHeader {
    /// The thread that writes into it.
    pub owner: Padded<Owner>,
    /// Slots published so far (written by the producer).
    pub tail: Padded<AtomicU64>,
    /// Slots consumed so far (written by the launcher).
    pub head: Padded<AtomicU64>,
}

impl RingHeader {
    /// A ring that nobody has claimed and nothing was written to, at this position.
    #[cfg(any(test, loom))]
    pub fn at(position: u64) -> RingHeader {
        RingHeader {
            owner: Padded(Owner::nobody()),
            tail: Padded(AtomicU64::new(position)),
            head: Padded(AtomicU64::new(position)),
        }
    }
}

const fn round_up(value: usize, to: usize) -> usize {
    value.div_ceil(to) * to
}

/// Offset of the ring headers.
pub const RINGS: usize = round_up(size_of::<SegmentHeader>(), 4096);
/// Offset of the slots.
pub const SLOTS: usize = round_up(RINGS + RING_COUNT * size_of::<RingHeader>(), 4096);
/// Size of a segment.
pub const SEGMENT_SIZE: usize = SLOTS + RING_COUNT * RING_SLOTS * size_of::<Slot>();

const _: () = assert!(RING_SLOTS.is_power_of_two());
const _: () = assert!(size_of::<Slot>() == 64);

/// Raise when the meaning of a slot, a counter or a definition changes without a change of sizes.
const REVISION: u64 = 3;

/// Identifies a build: launcher and library must agree exactly.
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
