//! Fragmentation: free memory in segments that contain blocks in use. It is measured when the allocator asks CUDA for
//! memory although it has as much free memory reserved.

use std::collections::HashMap;

use memtrace_trace::event::{Action, Event};
use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::phase::ProgramPosition;
use memtrace_replay::{Allocator, BlockState, Segment};

/// The size of a segment for small blocks (`kSmallBuffer`), in bytes.
const SMALL_SEGMENT: u64 = 2 << 20;
/// The segments are measured again only when free memory exceeds the last maximum by this factor, in hundredths.
const MIN_INCREASE: u64 = 105;

/// The blocks of one source that keep free memory from being used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockingSource {
    /// Free bytes in segments with such blocks, divided equally among the sources in a segment.
    pub blocked: u64,
    /// The bytes of the blocks.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// The worst fragmentation of one device so far.
#[derive(Clone, Debug, Default)]
pub struct WorstFragmentation {
    /// How often the allocator requested more memory although as much was free.
    pub times: u64,
    /// The highest number of free bytes in segments with blocks in use. The other fields describe this point in time.
    pub blocked: u64,
    /// The number of these segments.
    pub segments: u64,
    /// The size of the largest free block, in bytes.
    pub largest_free: u64,
    /// The requested bytes.
    pub requested: u64,
    /// Reserved bytes, including the request if it succeeded.
    pub reserved: u64,
    /// The program's position.
    pub position: Option<ProgramPosition>,
    /// `seq` of the event.
    pub seq: u64,
    /// Whether the request failed.
    pub failed: bool,
    /// By the source of the blocks in use, by free bytes in descending order. At most eight.
    pub blocked_by: Vec<((StackId, ContextId), BlockingSource)>,
}

impl WorstFragmentation {
    pub(super) fn segment_requested(&mut self, allocator: &Allocator, e: &Event, position: &ProgramPosition) {
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
        if free * 100 < self.blocked * MIN_INCREASE {
            return;
        }
        let mut sources: HashMap<(StackId, ContextId), BlockingSource> = HashMap::new();
        let (mut blocked, mut segments, mut largest_free) = (0, 0, 0);
        let usable = |s: &&Segment| !s.expandable && s.pool == 0 && !s.small && s.stream == e.stream;
        for segment in allocator.segments().iter().filter(usable) {
            let inactive = |b: &&memtrace_replay::Block| b.state == BlockState::Inactive;
            let free: u64 = segment.blocks.iter().filter(inactive).map(|b| b.size).sum();
            let in_use: Vec<_> = segment.blocks.iter().filter(|b| b.is_active()).collect();
            if free == 0 || in_use.is_empty() {
                continue;
            }
            blocked += free;
            segments += 1;
            largest_free = segment.blocks.iter().filter(inactive).map(|b| b.size).fold(largest_free, u64::max);
            let mut origins: Vec<(StackId, ContextId)> = in_use.iter().map(|b| (b.stack, b.context)).collect();
            origins.sort_unstable();
            origins.dedup();
            for origin in &origins {
                sources.entry(*origin).or_default().blocked += free / origins.len() as u64;
            }
            for block in in_use {
                let source = sources.entry((block.stack, block.context)).or_default();
                source.bytes += block.size;
                source.blocks += 1;
            }
        }
        if blocked < bytes {
            return;
        }
        self.times += 1;
        if blocked <= self.blocked {
            return;
        }
        let mut blocked_by: Vec<_> = sources.into_iter().collect();
        blocked_by.sort_by_key(|(origin, source)| (std::cmp::Reverse(source.blocked), *origin));
        blocked_by.truncate(8);
        *self = WorstFragmentation {
            times: self.times,
            blocked,
            segments,
            largest_free,
            requested: bytes,
            reserved: usage.reserved,
            position: Some(*position),
            seq: e.seq,
            failed,
            blocked_by,
        };
    }
}
