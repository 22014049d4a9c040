//! Fragmentation: free memory in segments that live blocks pin, looked at when the allocator had to ask CUDA for more although it had as
//! much free.

use std::collections::HashMap;

use memtrace_trace::event::{Action, Event};
use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::phase::Moment;
use memtrace_replay::{Allocator, BlockState, Segment};

/// A segment for small blocks (`kSmallBuffer`).
const SMALL_SEGMENT: u64 = 2 << 20;
/// Looked at again only when so much more is free, in hundredths.
const MORE: u64 = 105;

/// What pins free memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pin {
    /// Free bytes in segments with such blocks; shared with what else lies there.
    pub pinned: u64,
    /// Bytes of the blocks.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Fragments {
    /// How often more was wanted although as much was free.
    pub times: u64,
    /// Free bytes in pinned segments, at most.
    pub pinned: u64,
    /// Segments they were in.
    pub segments: u64,
    /// The largest free piece then.
    pub largest: u64,
    /// What was wanted then.
    pub wanted: u64,
    /// Reserved then, with what was wanted.
    pub reserved: u64,
    /// Where the program was then.
    pub at: Option<Moment>,
    /// `seq` of that event.
    pub seq: u64,
    /// Whether it failed then.
    pub failed: bool,
    /// By the source of the live blocks, most pinned first.
    pub pins: Vec<((StackId, ContextId), Pin)>,
}

impl Fragments {
    pub(super) fn wanted(&mut self, allocator: &Allocator, e: &Event, at: &Moment) {
        let (bytes, failed) = (e.size, e.action == Action::Oom);
        // Small blocks have segments of their own, which large ones do not share; so do streams and private pools.
        if bytes <= SMALL_SEGMENT || e.pool != 0 {
            return;
        }
        let usage = allocator.usage();
        let reserved_before = usage.reserved.saturating_sub(if failed { 0 } else { bytes });
        let free = reserved_before.saturating_sub(usage.active);
        if free < bytes {
            return;
        }
        if free * 100 < self.pinned * MORE {
            return;
        }
        let mut pins: HashMap<(StackId, ContextId), Pin> = HashMap::new();
        let (mut pinned, mut segments, mut largest) = (0, 0, 0);
        let usable = |s: &&Segment| !s.expandable && s.pool == 0 && !s.small && s.stream == e.stream;
        for segment in allocator.segments().iter().filter(usable) {
            let inactive = |b: &&memtrace_replay::Block| b.state == BlockState::Inactive;
            let free: u64 = segment.blocks.iter().filter(inactive).map(|b| b.size).sum();
            let live: Vec<_> = segment.blocks.iter().filter(|b| b.is_active()).collect();
            if free == 0 || live.is_empty() {
                continue;
            }
            pinned += free;
            segments += 1;
            largest = segment.blocks.iter().filter(inactive).map(|b| b.size).fold(largest, u64::max);
            let mut sources: Vec<(StackId, ContextId)> = live.iter().map(|b| (b.stack, b.context)).collect();
            sources.sort_unstable();
            sources.dedup();
            for source in &sources {
                pins.entry(*source).or_default().pinned += free / sources.len() as u64;
            }
            for block in live {
                let pin = pins.entry((block.stack, block.context)).or_default();
                pin.bytes += block.size;
                pin.blocks += 1;
            }
        }
        if pinned < bytes {
            return;
        }
        self.times += 1;
        if pinned <= self.pinned {
            return;
        }
        let mut pins: Vec<_> = pins.into_iter().collect();
        pins.sort_by_key(|(source, pin)| (std::cmp::Reverse(pin.pinned), *source));
        pins.truncate(8);
        *self = Fragments {
            times: self.times,
            pinned,
            segments,
            largest,
            wanted: bytes,
            reserved: usage.reserved,
            at: Some(*at),
            seq: e.seq,
            failed,
            pins,
        };
    }
}
