//! Decides, for a recording with too many blocks for a page, which blocks the page lists one by one, and at which points
//! it has totals.
//!
//! The page lists the largest blocks. Of the smallest size that it lists, it lists the blocks with the longest lifetimes.
//! The other blocks are added up at each point. A point is the highest, the lowest or the last event of a range of events,
//! so no peak and no end is lost, and each point is a state that existed.

use std::collections::BTreeMap;

use memtrace_input::load::Process;
use memtrace_replay::{Change, Replay};

/// Classes of sizes: 32 for each power of two.
const SIZE_CLASSES: usize = 64 * 32;
/// Classes of lifetimes: one for each power of two.
const LIFETIME_CLASSES: usize = 65;
/// The number of ranges of events that have points.
const RANGES: u64 = 10_000;

/// The class of a size. A larger size never has a lower class.
fn size_class(size: u64) -> usize {
    let bits = u64::BITS - size.leading_zeros();
    let digits = if bits > 5 { (size >> (bits - 6)) & 31 } else { size & 31 };
    (bits as usize).saturating_sub(1) * 32 + digits as usize
}

fn lifetime_class(events: u64) -> usize {
    (u64::BITS - events.leading_zeros()) as usize
}

/// Which blocks of a device the page lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Listed {
    size_class: usize,
    lifetime_class: usize,
}

impl Listed {
    /// Whether the page lists a block of this size and lifetime, in events.
    pub(super) fn has(&self, size: u64, lifetime: u64) -> bool {
        (size_class(size), lifetime_class(lifetime)) >= (self.size_class, self.lifetime_class)
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
    counts: Vec<u32>,
    points: Vec<Point>,
    range: u64,
    low: Point,
    high: Point,
    last: Point,
}

impl Device {
    fn new() -> Device {
        Device {
            counts: vec![0; SIZE_CLASSES * LIFETIME_CLASSES],
            points: Vec::new(),
            range: u64::MAX,
            low: Point::default(),
            high: Point::default(),
            last: Point::default(),
        }
    }

    fn add_block(&mut self, size: u64, lifetime: u64) {
        let count = &mut self.counts[size_class(size) * LIFETIME_CLASSES + lifetime_class(lifetime)];
        *count = count.saturating_add(1);
    }

    /// Takes the state after an event of the range with this number.
    fn advance(&mut self, range: u64, point: Point) {
        if range != self.range {
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
        self.close();
        let mut listed = Listed { size_class: SIZE_CLASSES, lifetime_class: 0 };
        let mut all = 0u64;
        'classes: for size_class in (0..SIZE_CLASSES).rev() {
            for lifetime_class in (0..LIFETIME_CLASSES).rev() {
                all += u64::from(self.counts[size_class * LIFETIME_CLASSES + lifetime_class]);
                if all > most {
                    break 'classes;
                }
                listed = Listed { size_class, lifetime_class };
            }
        }
        DeviceSelection { listed, points: self.points }
    }
}

/// Selects at most `most` blocks of each device. `marks` are events, by `seq`, that need a point of their own. Streams
/// the recording once.
pub(super) fn select(
    process: &Process,
    most: u64,
    marks: &[u64],
    progress: &mut dyn FnMut(u64),
) -> BTreeMap<i16, DeviceSelection> {
    let recording = process.recording();
    let width = recording.event_count().div_ceil(RANGES).max(1);
    let mut marks: Vec<u64> = marks.to_vec();
    marks.sort_unstable();
    marks.dedup();
    let mut replay = Replay::new(process.trace_index(), None);
    let mut devices: Vec<(i16, Device)> = replay.devices().iter().map(|one| (one.device, Device::new())).collect();
    let (mut done, mut passed, mut last_seq) = (0, 0, 0);
    recording.stream(&mut |events| {
        for e in events {
            last_seq = e.seq;
            // A range ends at a mark.
            while marks.get(passed).is_some_and(|mark| *mark < e.seq) {
                passed += 1;
            }
            let range = e.seq / width + passed as u64;
            replay.apply(e, |replay, slot, e, change| {
                let allocator = &replay.devices()[slot].allocator;
                let Some((_, device)) = devices.get_mut(slot) else { return };
                match change {
                    Change::Alloc(_) => {}
                    Change::FreeRequested(id) => {
                        let block = allocator.block(id);
                        device.add_block(block.size, e.seq.saturating_sub(block.seq));
                    }
                    _ => return,
                }
                let allocated = allocator.usage().allocated;
                device.advance(range, Point { seq: e.seq, ticks: e.ticks, allocated });
            });
        }
        done += events.len() as u64;
        progress(done);
    });
    for (slot, (_, device)) in devices.iter_mut().enumerate() {
        for (_, block) in replay.devices()[slot].allocator.allocated() {
            device.add_block(block.size, u64::MAX);
        }
    }
    devices.into_iter().map(|(ordinal, device)| (ordinal, device.finish(most))).collect()
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
        let classes: Vec<usize> = sorted.iter().map(|size| size_class(*size)).collect();
        assert!(classes.is_sorted(), "{sorted:?} {classes:?}");
        assert!(size_class(u64::MAX) < SIZE_CLASSES);
        assert!(lifetime_class(u64::MAX) < LIFETIME_CLASSES);
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
