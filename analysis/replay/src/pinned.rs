//! Page-locked host memory at its peak, by who allocated it.

use std::collections::BTreeMap;

/// The page-locked host memory of one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PinnedBlocks {
    /// Its bytes.
    pub bytes: u64,
    /// The number of its allocations.
    pub blocks: u64,
    /// The bytes of those allocations whose size is a power of two.
    pub powers_of_two: u64,
}

impl PinnedBlocks {
    /// Adds other memory.
    pub fn add(&mut self, other: &PinnedBlocks) {
        self.bytes += other.bytes;
        self.blocks += other.blocks;
        self.powers_of_two += other.powers_of_two;
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct PinnedState {
    now: PinnedBlocks,
    at_peak: PinnedBlocks,
    /// Whether `now` changed after the last peak.
    changed: bool,
}

/// The page-locked host memory of a process.
#[derive(Clone, Debug)]
pub(super) struct PinnedMemory<At> {
    by_place: BTreeMap<At, PinnedState>,
    /// Those that changed after the last peak: a new peak costs no more than the changes before it.
    changed: Vec<At>,
    bytes: u64,
    peak: u64,
}

impl<At> Default for PinnedMemory<At> {
    fn default() -> PinnedMemory<At> {
        PinnedMemory { by_place: BTreeMap::new(), changed: Vec::new(), bytes: 0, peak: 0 }
    }
}

impl<At: Copy + Ord> PinnedMemory<At> {
    /// Counts an allocation.
    pub(super) fn add(&mut self, at: At, size: u64) {
        self.change(at, size, |count, by| *count += by);
        if self.bytes >= self.peak {
            self.peak = self.bytes;
            for at in self.changed.drain(..) {
                let state = self.by_place.entry(at).or_default();
                (state.at_peak, state.changed) = (state.now, false);
            }
        }
    }

    /// Counts a free.
    pub(super) fn subtract(&mut self, at: At, size: u64) {
        self.change(at, size, |count, by| *count = count.saturating_sub(by));
    }

    fn change(&mut self, at: At, size: u64, count: fn(&mut u64, u64)) {
        let state = self.by_place.entry(at).or_default();
        count(&mut state.now.bytes, size);
        count(&mut state.now.blocks, 1);
        count(&mut state.now.powers_of_two, if size.is_power_of_two() { size } else { 0 });
        count(&mut self.bytes, size);
        if !std::mem::replace(&mut state.changed, true) {
            self.changed.push(at);
        }
    }

    /// The memory at the peak.
    pub(super) fn at_peak(&self) -> BTreeMap<At, PinnedBlocks> {
        let held = self.by_place.iter().filter(|(_, state)| state.at_peak.blocks > 0);
        held.map(|(at, state)| (*at, state.at_peak)).collect()
    }

    /// The number of places.
    pub(super) fn entries(&self) -> usize {
        self.by_place.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_that_of_the_sum() {
        let mut pinned = PinnedMemory::default();
        pinned.add(1, 64);
        pinned.add(1, 64);
        pinned.subtract(1, 64);
        pinned.add(2, 100);
        pinned.subtract(2, 100);
        pinned.add(3, 32);
        let first = PinnedBlocks { bytes: 64, blocks: 1, powers_of_two: 64 };
        let second = PinnedBlocks { bytes: 100, blocks: 1, powers_of_two: 0 };
        assert_eq!(pinned.at_peak(), BTreeMap::from([(1, first), (2, second)]));
    }
}
