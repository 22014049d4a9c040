//! Decides, for a recording with too many blocks for a page, which blocks the page lists one by one, and at which
//! points it has totals.
//!
//! The page lists all blocks that were allocated at the marks (the peak, errors) and at the end, and the largest
//! others. Of the smallest size that it lists, it lists the blocks with the longest lifetimes. The other blocks are
//! added up at each point. A point is the highest, the lowest or the last event of a range of events, so no peak and no
//! end is lost, and each point is a state that existed.

use std::collections::{BTreeMap, HashMap};

use memtrace_input::AddressBuildHasher;
use memtrace_input::load::Process;
use memtrace_insight::passes::ReplayObserver;
use memtrace_replay::{Change, Replay};
use memtrace_trace::event::Event;

use super::seq_range::{RangePosition, SeqRange};

/// The number of ranges of events that have points.
const RANGES: u64 = 10_000;

/// The class of a number: 32 for each power of two. A larger number never has a lower class.
fn class(number: u64) -> u32 {
    let bits = u64::BITS - number.leading_zeros();
    let digits = if bits > 5 { (number >> (bits - 6)) & 31 } else { number & 31 };
    bits.saturating_sub(1) * 32 + digits as u32
}

/// Which blocks of a device the page lists, besides those at the marks and at the end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub(super) struct Listed {
    size_class: u32,
    lifetime_class: u32,
}

impl Listed {
    fn of(size: u64, lifetime: u64) -> Listed {
        Listed { size_class: class(size), lifetime_class: class(lifetime) }
    }

    /// Whether the page lists a block of this size and lifetime, in events.
    pub(super) fn has(&self, size: u64, lifetime: u64) -> bool {
        Listed::of(size, lifetime) >= *self
    }
}

/// A state whose totals the page has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Point {
    pub(super) seq: u64,
    pub(super) ticks: u64,
    pub(super) allocated: u64,
}

/// The selection for one device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct DeviceSelection {
    pub(super) listed: Listed,
    /// In order of `seq`.
    pub(super) points: Vec<Point>,
}

/// The blocks of one device by class, and the points of its current range.
struct Device {
    counts: HashMap<Listed, u64, AddressBuildHasher>,
    /// The last state before the part.
    before: Option<Point>,
    points: Vec<Point>,
    range: u64,
    low: Point,
    high: Point,
    last: Point,
}

impl Device {
    fn new() -> Device {
        Device {
            counts: HashMap::default(),
            before: None,
            points: Vec::new(),
            range: u64::MAX,
            low: Point::default(),
            high: Point::default(),
            last: Point::default(),
        }
    }

    fn add_block(&mut self, size: u64, lifetime: u64) {
        *self.counts.entry(Listed::of(size, lifetime)).or_default() += 1;
    }

    /// Observes the state after an event of the range with this number.
    fn advance(&mut self, range: u64, point: Point) {
        if range != self.range {
            self.points.extend(self.before.take());
            self.close();
            self.range = range;
            (self.low, self.high) = (point, point);
        }
        if point.allocated > self.high.allocated {
            self.high = point;
        }
        if point.allocated < self.low.allocated {
            self.low = point;
        }
        self.last = point;
    }

    /// Ends the current range.
    fn close(&mut self) {
        if self.range == u64::MAX {
            return;
        }
        let mut ends = [self.low, self.high, self.last];
        ends.sort_unstable_by_key(|point| point.seq);
        for point in ends {
            if self.points.last().is_none_or(|last| last.seq < point.seq) {
                self.points.push(point);
            }
        }
    }

    fn finish(mut self, most: u64) -> DeviceSelection {
        self.points.extend(self.before.take());
        self.close();
        let mut classes: Vec<(Listed, u64)> = self.counts.into_iter().collect();
        classes.sort_unstable_by(|a, b| b.cmp(a));
        let mut listed = Listed { size_class: u32::MAX, lifetime_class: 0 };
        let mut all = 0;
        for (class, count) in classes {
            all += count;
            if all > most {
                return DeviceSelection { listed, points: self.points };
            }
            listed = class;
        }
        DeviceSelection { listed: Listed::default(), points: self.points }
    }
}

/// Selects blocks of each device in a part of a recording while it is replayed.
pub(super) struct Selector {
    /// The maximum number of blocks of each device.
    most: u64,
    /// Events, by `seq`, that need a point of their own, in order.
    marks: Vec<u64>,
    part: SeqRange,
    /// The number of events of a range.
    width: u64,
    /// The number of marks before the latest event.
    passed: usize,
    /// In the order of the replay's devices.
    devices: Vec<(i16, Device)>,
}

impl Selector {
    pub(super) fn new(process: &Process, most: u64, marks: &[u64], part: SeqRange) -> Selector {
        let mut marks: Vec<u64> = marks.to_vec();
        marks.sort_unstable();
        marks.dedup();
        Selector {
            most,
            marks,
            part,
            width: process.recording().event_count().min(part.length()).div_ceil(RANGES).max(1),
            passed: 0,
            devices: process.trace_index().sources.keys().map(|device| (*device, Device::new())).collect(),
        }
    }

    /// The selections, by device.
    pub(super) fn finish(self) -> BTreeMap<i16, DeviceSelection> {
        self.devices.into_iter().map(|(ordinal, device)| (ordinal, device.finish(self.most))).collect()
    }
}

impl ReplayObserver for Selector {
    #[inline]
    fn before(&mut self, e: &Event) {
        // A range ends at a mark.
        while self.marks.get(self.passed).is_some_and(|mark| *mark < e.seq) {
            self.passed += 1;
        }
    }

    #[inline]
    fn changed(&mut self, replay: &Replay, slot: usize, e: &Event, change: &Change) {
        let allocator = &replay.devices()[slot].allocator;
        let range = e.seq / self.width + self.passed as u64;
        let Some((_, device)) = self.devices.get_mut(slot) else { return };
        match change {
            Change::Alloc(_) => {}
            Change::FreeRequested(id) => {
                let block = allocator.block(*id);
                if self.part.has_block(block.seq, Some(e.seq)) {
                    device.add_block(block.size, e.seq.saturating_sub(block.seq));
                }
            }
            _ => return,
        }
        let point = Point { seq: e.seq, ticks: e.ticks, allocated: allocator.usage().allocated };
        match self.part.place(e.seq) {
            RangePosition::Before => device.before = Some(point),
            RangePosition::Inside => device.advance(range, point),
            RangePosition::After => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_monotonic() {
        let sizes: Vec<u64> =
            (0..64).chain((6..63).flat_map(|bit| [(1 << bit) - 1, 1 << bit, 3 << (bit - 1)])).collect();
        let mut sorted = sizes.clone();
        sorted.sort_unstable();
        let classes: Vec<u32> = sorted.iter().map(|size| class(*size)).collect();
        assert!(classes.is_sorted(), "{sorted:?} {classes:?}");
        assert!(class(u64::MAX) > class(1 << 63));
    }

    #[test]
    fn the_largest_blocks_are_listed_and_of_equal_ones_those_that_live_longest() {
        let mut device = Device::new();
        (0..10).for_each(|_| device.add_block(1 << 20, 100));
        (0..10).for_each(|_| device.add_block(512, 7));
        (0..10).for_each(|_| device.add_block(512, 7000));
        let listed = device.finish(25).listed;
        assert!(listed.has(1 << 20, 0) && listed.has(512, 7000) && !listed.has(512, 7) && !listed.has(8, 1 << 40));
        let none = Device::new().finish(10).listed;
        assert!(none.has(0, 0), "nothing is left out of an empty device");
    }

    #[test]
    fn a_range_keeps_its_extremes_and_its_end() {
        let mut device = Device::new();
        let levels = [5, 9, 2, 9, 4];
        for (seq, allocated) in (1..).zip(levels) {
            device.advance(0, Point { seq, ticks: seq, allocated });
        }
        device.advance(1, Point { seq: 6, ticks: 6, allocated: 1 });
        let points: Vec<(u64, u64)> = device.finish(9).points.iter().map(|p| (p.seq, p.allocated)).collect();
        assert_eq!(points, [(2, 9), (3, 2), (5, 4), (6, 1)]);
    }
}
