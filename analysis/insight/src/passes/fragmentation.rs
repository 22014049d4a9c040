//! What the reserved memory of one moment was: in use, lost to rounding, free and returnable, or free and pinned by what lives beside
//! it.
//!
//! A segment goes back to CUDA as a whole, and serves one stream; an expandable one page by page (2 MiB for small blocks, 20 MiB for
//! large ones). What is free beside a live block can serve requests that are not larger than it, and nothing else.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use memtrace_replay::{Allocator, Block, BlockState, Segment};

/// Pages of expandable segments.
const SMALL_PAGE: u64 = 2 << 20;
const LARGE_PAGE: u64 = 20 << 20;

/// Live blocks of one origin, and the free memory that they keep from being returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pin {
    /// Whose blocks: the stack and the autograd node.
    pub by: (StackId, ContextId),
    /// `seq` of the allocation of the largest of the blocks.
    pub seq: u64,
    /// Blocks.
    pub blocks: u64,
    /// Their bytes.
    pub live: u64,
    /// Segments in which nothing else lives.
    pub segments: u64,
    /// The size of these segments.
    pub reserved: u64,
    /// What is free in them.
    pub free: u64,
}

/// See the module. Bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reserved {
    /// Blocks in use, rounded.
    pub allocated: u64,
    /// Of that, what nobody asked for.
    pub rounding: u64,
    /// Given back, but streams still use it.
    pub waiting: u64,
    /// Free: unused segments and unused pages, which can be returned.
    pub returnable: u64,
    /// Free beside live blocks.
    pub pinned: u64,
    /// The largest free block.
    pub largest_free: u64,
    /// Segments.
    pub segments: u64,
    /// Of these, segments with live blocks and pinned memory.
    pub pinned_segments: u64,
    /// Who alone pins segments, most free bytes first.
    pub pins: Vec<Pin>,
}

impl Reserved {
    /// Of an allocator now; `pins` at most.
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
        // Expandable segments are one for all.
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

/// The pages of a free block of an expandable segment that hold nothing else.
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
        // Alone in the first; with another in the second; the third is unused.
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
        // 25 to 60 is free: the page from 40 to 60. 65 to 100 is free: the page from 80 to 100.
        let found = Reserved::of(&a, 9);
        assert_eq!((found.returnable, found.pinned), (40 * MIB, 30 * MIB));
        assert!(found.pins.is_empty());
    }
}
