//! The curve: points in time, with the allocated bytes of each by category.

use memtrace_trace::clock::Calibration;
use memtrace_trace::event::Event;
use memtrace_trace::ids::FrameId;

use crate::window::Window;
use memtrace_insight::passes::{BlockAllocation, BlockClassification, BlockObserver, Category};
use memtrace_replay::Usage;

/// Bytes by category, in the order of [`Category::ALL`].
pub(crate) type Bytes = [i64; Category::ALL.len()];
const NO_BYTES: Bytes = [0; Category::ALL.len()];

/// A point of the curve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Point {
    /// The time in nanoseconds since 1970.
    pub(crate) time_ns: u64,
    /// Allocated bytes right after the event of that time.
    pub(crate) bytes: Bytes,
}

impl Point {
    /// The sum of all categories.
    pub(crate) fn total(&self) -> i64 {
        self.bytes.iter().sum()
    }
}

/// The points of one device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Curve {
    /// The points, in order of time.
    pub(crate) points: Vec<Point>,
    /// Whether every event has a point.
    pub(crate) is_exact: bool,
}

/// One slice of the recording.
#[derive(Clone, Copy, Debug)]
struct Slice {
    /// `seq` of the event of its peak; 0 if nothing happened on the device.
    seq: u64,
    ticks: u64,
    /// Allocated bytes at its peak, minus those at the peak of the previous slice.
    change: Bytes,
}

/// Builds a curve from block lifetimes.
#[derive(Debug)]
pub(crate) struct CurveBuilder<'w> {
    window: &'w Window,
    device: i16,
    /// `seq` of the first event.
    first: u64,
    /// The number of events per slice.
    width: u64,
    slices: Vec<Slice>,
    /// The slice of the current events.
    current: usize,
    /// Allocated bytes after the latest event, and at the peak of the current slice.
    bytes: u64,
    peak_bytes: u64,
    /// Blocks that were allocated at the peak of the current slice and freed later in it.
    freed_after_peak: Bytes,
    last_ticks: u64,
}

impl<'w> CurveBuilder<'w> {
    /// Makes a builder for a window of a recording with `events` events. The curve has at most `points` points.
    pub(crate) fn new(window: &'w Window, device: i16, events: u64, points: u64) -> CurveBuilder<'w> {
        let first = window.first().max(1);
        let events = events.saturating_sub(first - 1).min(window.last() - (first - 1)).max(1);
        let width = events.div_ceil(points.max(1)).max(1);
        let slices = vec![Slice { seq: 0, ticks: 0, change: NO_BYTES }; events.div_ceil(width) as usize + 1];
        CurveBuilder {
            window,
            device,
            first,
            width,
            slices,
            current: 0,
            bytes: 0,
            peak_bytes: 0,
            freed_after_peak: NO_BYTES,
            last_ticks: 0,
        }
    }

    /// The slice of an event. Lost events make `seq` larger than the number of events; the excess shares the last
    /// slice.
    fn slice_of(&self, seq: u64) -> usize {
        ((seq.saturating_sub(self.first) / self.width) as usize).min(self.slices.len() - 2)
    }

    /// Observes an event after which `bytes` bytes are allocated.
    fn advance(&mut self, seq: u64, ticks: u64, bytes: u64) {
        if !self.window.contains(seq) {
            if !self.window.is_past(seq) {
                self.bytes = bytes;
            }
            return;
        }
        if self.last_ticks == 0 && self.bytes > 0 {
            // Bytes that were allocated before the window began.
            self.peak_bytes = self.bytes;
            (self.slices[0].seq, self.slices[0].ticks) = (self.first - 1, ticks);
        }
        let slice = self.slice_of(seq);
        let first = slice != self.current || self.slices[slice].seq == 0;
        if first {
            self.close();
            self.current = slice;
        }
        if first || bytes > self.peak_bytes {
            self.peak_bytes = bytes;
            self.freed_after_peak = NO_BYTES;
            (self.slices[slice].seq, self.slices[slice].ticks) = (seq, ticks);
        }
        self.bytes = bytes;
        self.last_ticks = ticks;
    }

    /// Ends the current slice. Its peak is now final.
    fn close(&mut self) {
        let freed = std::mem::replace(&mut self.freed_after_peak, NO_BYTES);
        for (category, bytes) in freed.into_iter().enumerate() {
            self.slices[self.current].change[category] += bytes;
            self.slices[self.current + 1].change[category] -= bytes;
        }
    }

    /// Ends the recording and returns the curve.
    pub(crate) fn finish(mut self, calibration: &Calibration) -> Curve {
        self.close();
        let mut bytes = NO_BYTES;
        let mut points = Vec::new();
        for slice in &self.slices {
            for (sum, change) in bytes.iter_mut().zip(slice.change) {
                *sum += change;
            }
            if slice.seq > 0 {
                points.push(Point { time_ns: calibration.epoch_ns(slice.ticks), bytes });
            }
        }
        Curve { points, is_exact: self.width == 1 }
    }
}

impl BlockObserver for CurveBuilder<'_> {
    fn allocated(&mut self, device: i16, block: &BlockAllocation, _: &Usage) {
        if device == self.device && self.window.has_size(block.memory.size) {
            self.advance(block.seq, block.ticks, self.bytes + block.memory.size);
        }
    }

    fn lifetime_ended(
        &mut self,
        device: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        _: FrameId,
        free: Option<&Event>,
    ) {
        if device != self.device {
            return;
        }
        let (category, size) = (classification.category as usize, block.memory.size as i64);
        if let Some(free) = free.filter(|_| self.window.has_size(block.memory.size)) {
            self.advance(free.seq, free.ticks, self.bytes.saturating_sub(block.memory.size));
        }
        let Some(free) = self.window.shows_block(device, block, free) else { return };
        let first_slice = self.slice_of(block.seq);
        // The block counts from its own slice if it was allocated at that slice's peak. All peaks but that of the
        // current slice are final.
        let from = if block.seq <= self.slices[first_slice].seq { first_slice } else { first_slice + 1 };
        match free {
            None => self.slices[from].change[category] += size,
            Some(free) => {
                if from < self.current {
                    self.slices[from].change[category] += size;
                    self.slices[self.current].change[category] -= size;
                }
                let peak_seq = self.slices[self.current].seq;
                if block.seq <= peak_seq && peak_seq < free.seq {
                    self.freed_after_peak[category] += size;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_insight::passes::{BlockAllocation, Proof};
    use memtrace_insight::rules::CategoryRuleId;
    use proptest::prelude::*;

    /// The order of allocations and frees of blocks given as (size, category, lifetime): the index of the block, and
    /// whether it is an allocation.
    fn events(blocks: &[(u64, usize, usize)]) -> Vec<(usize, bool)> {
        let mut order: Vec<(usize, usize, bool)> = Vec::new();
        for (i, (_, _, life)) in blocks.iter().enumerate() {
            order.push((2 * i, i, true));
            if *life > 0 {
                order.push((2 * (i + life) - 1, i, false));
            }
        }
        order.sort_by_key(|(at, i, is_alloc)| (*at, !*is_alloc, *i));
        order.into_iter().map(|(_, i, is_alloc)| (i, is_alloc)).collect()
    }

    proptest! {
        #[test]
        fn the_curve_matches_a_simple_count(
            blocks in proptest::collection::vec((1u64..100, 0usize..4, 0usize..9), 1..60),
            points in 1u64..200,
            bounds in proptest::option::of((0usize..120, 0usize..120, 0u64..60)),
        ) {
            let order = events(&blocks);
            let (first, last, least) = bounds.map_or((1, order.len(), 0), |(a, b, least)| {
                let first = 1 + a.min(b).min(order.len() - 1);
                (first, (1 + a.max(b)).min(order.len()), least)
            });
            let window = Window::for_tests(first as u64, last as u64, least);
            let mut builder = CurveBuilder::new(&window, 0, order.len() as u64, points);
            let mut allocations: Vec<Option<BlockAllocation>> = vec![None; blocks.len()];
            let mut level: Bytes = NO_BYTES;
            let mut truth: Vec<(bool, Bytes)> = Vec::new();
            for (at, (i, is_alloc)) in order.iter().enumerate() {
                let (size, category, _) = blocks[*i];
                let seq = at as u64 + 1;
                if *is_alloc {
                    let mut block = BlockAllocation::for_tests(seq);
                    block.memory.size = size;
                    allocations[*i] = Some(block);
                    builder.allocated(0, &block, &Usage::default());
                    level[category] += if size >= least { size as i64 } else { 0 };
                } else {
                    let rule = CategoryRuleId::NoCategoryRule;
                    let classification = BlockClassification { category: Category::ALL[category], rule };
                    let free = Event { seq, ticks: seq, ..Event::EMPTY };
                    builder.lifetime_ended(0, &allocations[*i].unwrap(), &classification, FrameId::NONE, Some(&free));
                    level[category] -= if size >= least { size as i64 } else { 0 };
                }
                truth.push((size >= least, level));
            }
            for (i, (_, category, life)) in blocks.iter().enumerate() {
                if *life == 0 {
                    let rule = CategoryRuleId::NoCategoryRule;
                    let classification = BlockClassification { category: Category::ALL[*category], rule };
                    builder.lifetime_ended(0, &allocations[i].unwrap(), &classification, FrameId::NONE, None);
                }
            }
            let width = builder.width as usize;
            let found: Vec<Bytes> = builder.finish(&Calibration::new(&[])).points.iter().map(|p| p.bytes).collect();
            // The first of the highest points of each slice.
            let total = |bytes: &Bytes| bytes.iter().sum::<i64>();
            let bytes_before = if first > 1 { truth[first - 2].1 } else { NO_BYTES };
            let any = truth[first - 1..last].iter().any(|(shown, _)| *shown);
            let expected: Vec<Bytes> = truth[first - 1..last].chunks(width).enumerate().filter_map(|(i, slice)| {
                // The state before the window is a point of its first slice.
                let began = (i == 0 && any && total(&bytes_before) > 0).then_some(bytes_before);
                let shown = slice.iter().filter(|(shown, _)| *shown).map(|(_, bytes)| *bytes);
                let candidates: Vec<Bytes> = began.into_iter().chain(shown).collect();
                let most = candidates.iter().map(total).max()?;
                candidates.into_iter().find(|bytes| total(bytes) == most)
            }).collect();
            prop_assert!(found.len() as u64 <= points.max(1));
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_test_allocation_has_no_proof() {
        assert_eq!(BlockAllocation::for_tests(1).proof, Proof::None);
    }
}
