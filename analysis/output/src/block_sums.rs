//! Sums of blocks by device and by any property of a block, such as its stack: those in use at the peak of each device,
//! those that were never freed, or all.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use memtrace_trace::event::Event;
use memtrace_trace::ids::FrameId;

use super::window::Window;
use memtrace_input::AddressBuildHasher;
use memtrace_input::load::Process;
use memtrace_insight::passes::{BlockAllocation, BlockClassification, BlockObserver};
use memtrace_replay::Usage;

/// The blocks that are summed up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FlameWeight {
    /// The blocks allocated at the window's peak of allocated bytes.
    #[default]
    Peak,
    /// Blocks allocated within the window and still allocated at its end.
    Leaks,
    /// All allocations within the window.
    Total,
}

impl FlameWeight {
    /// Formats the choice.
    pub(super) const fn text(self) -> &'static str {
        match self {
            FlameWeight::Peak => "at the peak",
            FlameWeight::Leaks => "never freed",
            FlameWeight::Total => "all allocations",
        }
    }
}

/// A number of blocks and their bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct BlockSum {
    pub(super) bytes: u64,
    pub(super) blocks: u64,
}

impl std::ops::AddAssign for BlockSum {
    fn add_assign(&mut self, other: BlockSum) {
        self.bytes += other.bytes;
        self.blocks += other.blocks;
    }
}

/// The sums of one device by key.
struct DeviceSums<K> {
    /// The bytes in use now.
    current: u64,
    /// `seq` of the event that reached the peak, and its allocated bytes.
    peak: Option<(u64, u64)>,
    /// Entries of an older generation belong to an older peak and are invalid.
    generation: u64,
    by_key: HashMap<K, (u64, BlockSum), AddressBuildHasher>,
}

impl<K> Default for DeviceSums<K> {
    fn default() -> DeviceSums<K> {
        DeviceSums { current: 0, peak: None, generation: 0, by_key: HashMap::default() }
    }
}

impl<K: Copy + Eq + Ord + Hash> DeviceSums<K> {
    fn add(&mut self, key: K, block: &BlockAllocation) {
        let (generation, sum) = self.by_key.entry(key).or_default();
        if *generation != self.generation {
            (*generation, *sum) = (self.generation, BlockSum::default());
        }
        *sum += BlockSum { bytes: block.memory.size, blocks: 1 };
    }

    /// Prepares for an event of the window, before it changes the level.
    fn start_peak(&mut self, window: &Window) {
        if self.peak.is_none() {
            self.peak = Some((window.first().saturating_sub(1), self.current));
        }
    }

    /// The sums by key, most bytes first.
    fn finish(self) -> Vec<(K, BlockSum)> {
        let now = self.generation;
        let all = self.by_key.into_iter().filter(|(_, (generation, sum))| *generation == now && sum.bytes > 0);
        let mut all: Vec<_> = all.map(|(key, (_, sum))| (key, sum)).collect();
        all.sort_by_key(|(key, sum)| (std::cmp::Reverse(sum.bytes), *key));
        all
    }
}

/// Sums up blocks by key over their lifetimes.
pub(super) struct BlockSums<'a, K> {
    window: &'a Window,
    of: FlameWeight,
    key: fn(&BlockAllocation, &BlockClassification) -> K,
    devices: BTreeMap<i16, DeviceSums<K>>,
}

impl<'a, K: Copy + Eq + Ord + Hash> BlockSums<'a, K> {
    /// Makes sums for the devices of the window. `key` is the property by which blocks are summed up.
    pub(super) fn new(
        process: &Process,
        window: &'a Window,
        of: FlameWeight,
        key: fn(&BlockAllocation, &BlockClassification) -> K,
    ) -> BlockSums<'a, K> {
        let devices = window.sources(process).keys().map(|device| (*device, DeviceSums::default())).collect();
        BlockSums { window, of, key, devices }
    }

    /// The sums of each device by key, most bytes first.
    pub(super) fn finish(self) -> impl Iterator<Item = (i16, Vec<(K, BlockSum)>)> {
        self.devices.into_iter().map(|(device, sums)| (device, sums.finish()))
    }
}

impl<K: Copy + Eq + Ord + Hash> BlockObserver for BlockSums<'_, K> {
    fn allocated(&mut self, device: i16, block: &BlockAllocation, _: &Usage) {
        let Some(sums) = self.devices.get_mut(&device).filter(|_| self.window.has_size(block.memory.size)) else {
            return;
        };
        if self.window.is_past(block.seq) {
            return;
        }
        let is_inside = self.window.contains(block.seq);
        if is_inside {
            sums.start_peak(self.window);
        }
        sums.current += block.memory.size;
        if self.of == FlameWeight::Peak && is_inside && sums.peak.is_none_or(|(_, peak)| sums.current > peak) {
            sums.peak = Some((block.seq, sums.current));
            sums.generation += 1;
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
        let Some(sums) = self.devices.get_mut(&device).filter(|_| self.window.has_size(block.memory.size)) else {
            return;
        };
        if let Some(free) = free.filter(|free| !self.window.is_past(free.seq)) {
            if self.window.contains(free.seq) {
                sums.start_peak(self.window);
            }
            sums.current = sums.current.saturating_sub(block.memory.size);
        }
        let Some(free) = self.window.shows_block(device, block, free) else { return };
        let is_summed = match self.of {
            FlameWeight::Leaks => free.is_none() && self.window.contains(block.seq),
            // Without an event in the window, all its blocks were allocated all the time.
            FlameWeight::Peak => sums.peak.is_none_or(|(peak, _)| block.seq <= peak),
            FlameWeight::Total => self.window.contains(block.seq),
        };
        if is_summed {
            sums.add((self.key)(block, classification), block);
        }
    }
}
