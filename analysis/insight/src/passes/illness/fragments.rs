//! Fragmentation: free memory in segments that contain blocks in use. It is measured when the allocator asks CUDA for
//! memory although it has as much free memory reserved.

use std::collections::HashMap;

use memtrace_trace::event::{Action, Event};
use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::phase::Moment;
use memtrace_replay::{Allocator, BlockState, Segment};

/// The size of a segment for small blocks (`kSmallBuffer`), in bytes.
const SMALL_SEGMENT: u64 = 2 << 20;
/// The segments are measured again only when free memory exceeds the last maximum by this factor, in hundredths.
const MORE: u64 = 105;

/// The blocks of one source that keep free memory from use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pin {
    /// Free bytes in segments with such blocks, divided equally among the sources in a segment.
    pub pinned: u64,
    /// The bytes of the blocks.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// The worst fragmentation of one device so far.
#[derive(Clone, Debug, Default)]
pub struct Fragments {
    /// How often the allocator wanted more memory although as much was free.
    pub times: u64,
    /// The highest number of free bytes in segments with blocks in use. The other fields describe this point in time.
    pub pinned: u64,
    /// The number of these segments.
    pub segments: u64,
    /// The size of the largest free block, in bytes.
    pub largest: u64,
    /// The requested bytes.
    pub wanted: u64,
    /// Reserved bytes, including the request if it succeeded.
    pub reserved: u64,
    /// The program's position.
    pub at: Option<Moment>,
    /// `seq` of the event.
    pub seq: u64,
    /// Whether the request failed.
    pub failed: bool,
    /// By the source of the blocks in use, by free bytes in descending order. At most eight.
    pub pins: Vec<((StackId, ContextId), Pin)>,
}

impl Fragments {
    pub(super) fn wanted(&mut self, allocator: &Allocator, e: &Event, at: &Moment) {
        let (bytes, failed) = (e.size, e.action == Action::Oom);
        // Small and large blocks never share segments. Streams and private pools do not share segments either.
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
