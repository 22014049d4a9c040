//! Divides the reserved memory at one point in time: in use, lost to rounding, free and returnable, or free and blocked
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
pub struct Pin {
    /// The origin: the stack and the autograd node.
    pub by: (StackId, ContextId),
    /// `seq` of the allocation of the largest block in the first of the segments.
    pub seq: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The bytes of the blocks.
    pub live: u64,
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
    pub waiting: u64,
    /// Free and returnable: unused segments and unused pages.
    pub returnable: u64,
    /// Free, but in segments or pages with blocks in use.
    pub pinned: u64,
    /// The largest free block.
    pub largest_free: u64,
    /// The number of segments.
    pub segments: u64,
    /// The number of segments with both blocks in use and blocked free memory.
    pub pinned_segments: u64,
    /// The origins that alone block whole segments, by free bytes in descending order.
    pub pins: Vec<Pin>,
}

impl Reserved {
    /// Measures an allocator's current state. Lists at most `pins` origins.
    pub fn of(allocator: &Allocator, pins: usize) -> Reserved {
        let mut reserved = Reserved::default();
        let mut by: HashMap<(StackId, ContextId), Pin> = HashMap::new();
        for segment in allocator.segments() {
            reserved.add(&segment, allocator.reservation_start(segment.addr), &mut by);
        }
        reserved.pins = by.into_values().filter(|pin| pin.free > 0).collect();
        reserved.pins.sort_by_key(|pin| (std::cmp::Reverse(pin.free), pin.seq));
        reserved.pins.truncate(pins);
        reserved
    }

    fn add(&mut self, segment: &Segment, base: Option<u64>, by: &mut HashMap<(StackId, ContextId), Pin>) {
        self.segments += 1;
        let (mut live, mut free) = (Vec::new(), 0);
        let whole = segment.blocks.iter().all(|block| block.state == BlockState::Inactive);
        for block in &segment.blocks {
            match block.state {
                BlockState::Allocated => {
                    self.allocated += block.size;
                    self.rounding += block.size.saturating_sub(block.requested);
                    live.push(block);
                }
                BlockState::PendingFree => {
                    self.waiting += block.size;
                    live.push(block);
                }
                BlockState::Inactive => {
                    let returnable = match (whole, segment.expandable) {
                        (_, true) => whole_pages(segment, base, block),
                        (true, false) => block.size,
                        (false, false) => 0,
                    };
                    self.returnable += returnable;
                    free += block.size - returnable;
                    self.largest_free = self.largest_free.max(block.size);
                }
                BlockState::Unmapped => {}
            }
        }
        self.pinned += free;
        self.pinned_segments += u64::from(free > 0 && !live.is_empty());
        // An expandable segment serves all origins, so no single origin blocks it.
        let Some(first) = live.first().filter(|_| free > 0 && !segment.expandable) else { return };
        let origin = |block: &Block| (block.stack, block.context);
        if live.iter().any(|block| origin(block) != origin(first)) {
            return;
        }
        let none = Pin { by: origin(first), seq: 0, blocks: 0, live: 0, segments: 0, reserved: 0, free: 0 };
        let pin = by.entry(origin(first)).or_insert(none);
        let largest = live.iter().max_by_key(|block| block.size).map_or(first.seq, |block| block.seq);
        pin.seq = if pin.seq == 0 { largest } else { pin.seq };
        pin.blocks += live.len() as u64;
        pin.live += live.iter().map(|block| block.size).sum::<u64>();
        pin.segments += 1;
        pin.reserved += segment.size;
        pin.free += free;
    }
}

/// Bytes of the pages that a free block of an expandable segment covers completely. `base`: the start of the segment's
/// address reservation.
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
    fn what_lives_pins_what_is_free_beside_it() {
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
        assert_eq!((found.returnable, found.pinned, found.largest_free), (20 * MIB, 42 * MIB, 32 * MIB));
        assert_eq!((found.segments, found.pinned_segments), (3, 2));
        let [pin] = &found.pins[..] else { panic!("{:?}", found.pins) };
        assert_eq!((pin.by.0, pin.seq, pin.blocks, pin.segments), (StackId(7), 4, 1, 1));
        assert_eq!((pin.live, pin.reserved, pin.free), (8 * MIB, 40 * MIB, 32 * MIB));
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
        assert_eq!((found.returnable, found.pinned), (40 * MIB, 30 * MIB));
        assert!(found.pins.is_empty());
    }
}
