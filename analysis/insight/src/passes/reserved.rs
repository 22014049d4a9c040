//! Divides the reserved memory at one point in time: in use, lost to rounding, free and releasable, or free and blocked
//! by blocks in use.
//!
//! A segment goes back to CUDA as a whole and serves a single stream. An expandable segment goes back page by page: 2
//! MiB for small blocks, 20 MiB for large ones. A free block beside a block in use can only serve requests that fit
//! into it.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use memtrace_replay::{Allocator, Block, BlockState, Segment};

/// The page sizes of expandable segments, in bytes.
const SMALL_PAGE: u64 = 2 << 20;
const LARGE_PAGE: u64 = 20 << 20;

/// The blocks in use of one origin, and the free memory that they keep from being returned. Sizes are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentBlocker {
    /// The origin: the stack and the autograd node.
    pub allocated_at: (StackId, ContextId),
    /// `seq` of the allocation of the largest block in the first of the segments.
    pub seq: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The bytes of the blocks.
    pub in_use: u64,
    /// The number of segments that contain no other blocks in use.
    pub segments: u64,
    /// The size of these segments.
    pub reserved: u64,
    /// The free bytes in these segments.
    pub free: u64,
}

/// The division of an allocator's reserved memory. Sizes are in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reserved {
    /// Blocks in use, rounded as the allocator rounds.
    pub allocated: u64,
    /// The part of `allocated` that is rounding, not requested.
    pub rounding: u64,
    /// Blocks that the program freed but streams still use.
    pub pending_free: u64,
    /// Free and releasable: unused segments and unused pages.
    pub releasable: u64,
    /// Free, but in segments or pages with blocks in use.
    pub blocked: u64,
    /// The largest free block.
    pub largest_free: u64,
    /// The number of segments.
    pub segments: u64,
    /// The number of segments with both blocks in use and blocked free memory.
    pub blocked_segments: u64,
    /// The origins that alone block whole segments, by free bytes in descending order.
    pub blocked_by: Vec<SegmentBlocker>,
}

impl Reserved {
    /// Measures an allocator's current state. Lists at most `max_blockers` origins.
    pub fn of(allocator: &Allocator, max_blockers: usize) -> Reserved {
        Reserved::of_pools(allocator, max_blockers, |_| true)
    }

    /// As [`Self::of`], for the segments of some private pools; 0 is the default pool.
    pub fn of_pools(allocator: &Allocator, max_blockers: usize, is_included: impl Fn(u16) -> bool) -> Reserved {
        let mut reserved = Reserved::default();
        let mut by: HashMap<(StackId, ContextId), SegmentBlocker> = HashMap::new();
        for segment in allocator.segments().into_iter().filter(|segment| is_included(segment.pool)) {
            reserved.add(&segment, allocator.reservation_start(segment.addr), &mut by);
        }
        reserved.blocked_by = by.into_values().filter(|blocker| blocker.free > 0).collect();
        reserved.blocked_by.sort_by_key(|blocker| (std::cmp::Reverse(blocker.free), blocker.seq));
        reserved.blocked_by.truncate(max_blockers);
        reserved
    }

    fn add(&mut self, segment: &Segment, base: Option<u64>, by: &mut HashMap<(StackId, ContextId), SegmentBlocker>) {
        self.segments += 1;
        let (mut in_use, mut free) = (Vec::new(), 0);
        let whole = segment.blocks.iter().all(|block| block.state == BlockState::Inactive);
        for block in &segment.blocks {
            match block.state {
                BlockState::Allocated => {
                    self.allocated += block.size;
                    self.rounding += block.size.saturating_sub(block.requested);
                    in_use.push(block);
                }
                BlockState::PendingFree => {
                    self.pending_free += block.size;
                    in_use.push(block);
                }
                BlockState::Inactive => {
                    let releasable = match (whole, segment.expandable) {
                        (_, true) => whole_pages(segment, base, block),
                        (true, false) => block.size,
                        (false, false) => 0,
                    };
                    self.releasable += releasable;
                    free += block.size - releasable;
                    self.largest_free = self.largest_free.max(block.size);
                }
                BlockState::Unmapped => {}
            }
        }
        self.blocked += free;
        self.blocked_segments += u64::from(free > 0 && !in_use.is_empty());
        // An expandable segment serves all origins, so no single origin blocks it.
        let Some(first) = in_use.first().filter(|_| free > 0 && !segment.expandable) else { return };
        let origin = |block: &Block| (block.stack, block.context);
        if in_use.iter().any(|block| origin(block) != origin(first)) {
            return;
        }
        let none = SegmentBlocker {
            allocated_at: origin(first),
            seq: 0,
            blocks: 0,
            in_use: 0,
            segments: 0,
            reserved: 0,
            free: 0,
        };
        let blocker = by.entry(origin(first)).or_insert(none);
        let largest = in_use.iter().max_by_key(|block| block.size).map_or(first.seq, |block| block.seq);
        blocker.seq = if blocker.seq == 0 { largest } else { blocker.seq };
        blocker.blocks += in_use.len() as u64;
        blocker.in_use += in_use.iter().map(|block| block.size).sum::<u64>();
        blocker.segments += 1;
        blocker.reserved += segment.size;
        blocker.free += free;
    }
}

/// Bytes of the pages that a free block of an expandable segment covers completely. `base` is the start of the
/// segment's address reservation.
fn whole_pages(segment: &Segment, base: Option<u64>, block: &Block) -> u64 {
    let page = if segment.small { SMALL_PAGE } else { LARGE_PAGE };
    let Some(start) = block.addr.checked_sub(base.unwrap_or(segment.addr)) else { return 0 };
    let (first, last) = (start.div_ceil(page) * page, (start + block.size) / page * page);
    last.saturating_sub(first)
}

#[cfg(test)]
mod tests {
    use memtrace_trace::event::{Action, Event};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn event(seq: u64, action: Action, addr: u64, size: u64, stack: u32) -> Event {
        Event { seq, action, addr, size, stack: StackId(stack), device: 0, ..Event::EMPTY }
    }

    #[test]
    fn blocks_in_use_block_the_free_memory_of_their_segment() {
        let mut a = Allocator::default();
        a.segment_alloc(&event(1, Action::SegmentAlloc, 100 * MIB, 40 * MIB, 0));
        a.segment_alloc(&event(2, Action::SegmentAlloc, 200 * MIB, 30 * MIB, 0));
        a.segment_alloc(&event(3, Action::SegmentAlloc, 300 * MIB, 20 * MIB, 0));
        // Alone in the first segment; beside another origin in the second; the third is unused.
        a.alloc(&event(4, Action::Alloc, 100 * MIB, 8 * MIB - 100, 7));
        a.alloc(&event(5, Action::Alloc, 200 * MIB, 10 * MIB, 7));
        a.alloc(&event(6, Action::Alloc, 210 * MIB, 10 * MIB, 8));
        let found = Reserved::of(&a, 9);
        assert_eq!((found.allocated, found.rounding), (28 * MIB, 100));
        assert_eq!((found.releasable, found.blocked, found.largest_free), (20 * MIB, 42 * MIB, 32 * MIB));
        assert_eq!((found.segments, found.blocked_segments), (3, 2));
        let [blocker] = &found.blocked_by[..] else { panic!("{:?}", found.blocked_by) };
        assert_eq!((blocker.allocated_at.0, blocker.seq, blocker.blocks, blocker.segments), (StackId(7), 4, 1, 1));
        assert_eq!((blocker.in_use, blocker.reserved, blocker.free), (8 * MIB, 40 * MIB, 32 * MIB));
    }

    #[test]
    fn whole_pages_of_an_expandable_segment_can_be_returned() {
        let mut a = Allocator::default();
        let base = 20 * MIB * 7;
        a.reserve(base, 1 << 40);
        a.segment_map(&event(1, Action::SegmentMap, base, 100 * MIB, 0));
        a.alloc(&event(2, Action::Alloc, base, 25 * MIB, 1));
        a.alloc(&event(3, Action::Alloc, base + 25 * MIB, 35 * MIB, 1));
        a.alloc(&event(4, Action::Alloc, base + 60 * MIB, 5 * MIB, 1));
        a.free_requested(base + 25 * MIB);
        a.free_completed(base + 25 * MIB);
        // 25 to 60 MiB is free: the page from 40 to 60 is whole. 65 to 100 MiB is free: the page from 80 to 100 is
        // whole.
        let found = Reserved::of(&a, 9);
        assert_eq!((found.releasable, found.blocked), (40 * MIB, 30 * MIB));
        assert!(found.blocked_by.is_empty());
    }
}
