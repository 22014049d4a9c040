//! The figures of `torch.cuda.memory_stats`, computed from events. Each figure has its current value, its peak, and the
//! totals added and removed. There is one set for the whole allocator, one for its pool of large blocks and one for its
//! pool of small blocks.
//!
//! The accounting follows `DeviceCachingAllocator` (c10/cuda/CUDACachingAllocator.cpp): `alloc_found_block`, `free`,
//! `free_block`, `map_block` and `unmap_block` define when which figure changes.

use std::collections::BTreeMap;

use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::named;

use super::pass::{DeviceChange, Pass, RecordingEnd};
use memtrace_input::EventSource;
use memtrace_replay::{Allocator, Anomalies, Block, BlockId, Change, Peak};

named! {
    /// A figure, named as in `torch.cuda.memory_stats`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Figure {
        /// Bytes of blocks in use by the program, rounded as the allocator rounds.
        AllocatedBytes => "allocated_bytes",
        /// `AllocatedBytes` plus the blocks that streams still use.
        ActiveBytes => "active_bytes",
        /// Requested bytes of active blocks.
        RequestedBytes => "requested_bytes",
        /// Bytes of segments.
        ReservedBytes => "reserved_bytes",
        /// Bytes of free blocks that share their segment, so that it cannot be released.
        InactiveSplitBytes => "inactive_split_bytes",
        /// Blocks in use by the program.
        Allocation => "allocation",
        /// `Allocation` plus the blocks that streams still use.
        Active => "active",
        /// Segments that `cudaMalloc` returned.
        Segment => "segment",
        /// Free blocks that share their segment.
        InactiveSplit => "inactive_split",
    }
}

/// One figure over time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stat {
    /// The value at the end.
    pub current: u64,
    /// The highest value.
    pub peak: u64,
    /// The sum of all increases.
    pub allocated: u64,
    /// The sum of all decreases.
    pub freed: u64,
}

impl Stat {
    #[inline]
    fn add(&mut self, amount: u64) {
        self.current = self.current.saturating_add(amount);
        self.allocated = self.allocated.saturating_add(amount);
        self.peak = self.peak.max(self.current);
    }

    #[inline]
    fn subtract(&mut self, amount: u64) {
        self.current = self.current.saturating_sub(amount);
        self.freed = self.freed.saturating_add(amount);
    }
}

/// The figures of one pool, or of all pools, in the order of [`Figure::ALL`].
pub type Stats = [Stat; Figure::ALL.len()];

/// The statistics of one device. Only PyTorch's allocator has figures by pool.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    /// The whole allocator.
    pub all: Stats,
    /// Blocks larger than 1 MiB.
    pub large: Stats,
    /// Blocks of at most 1 MiB.
    pub small: Stats,
    /// The highest totals, each at its own point in time.
    pub highest: Peak,
    /// Events that contradict the replayed state.
    pub anomalies: Anomalies,
}

/// Collects [`Statistics`].
#[derive(Clone, Debug, Default)]
pub(crate) struct StatisticsCollector {
    statistics: Statistics,
    /// By the address of obtained memory: whether it serves small blocks.
    obtained: BTreeMap<u64, bool>,
    /// Memory obtained since the last allocation: address, bytes, and whether it is a whole segment. The next
    /// allocation shows which pool it serves.
    unassigned: Vec<(u64, u64, bool)>,
}

impl From<StatisticsCollector> for Statistics {
    fn from(collector: StatisticsCollector) -> Statistics {
        collector.statistics
    }
}

impl Pass for StatisticsCollector {
    #[inline]
    fn changed(&mut self, change: &DeviceChange<'_>) {
        if change.source == EventSource::Torch {
            self.observe(change.allocator, change.e, change.change);
        }
    }

    fn finish(&mut self, end: &RecordingEnd<'_>) {
        self.statistics.highest = *end.allocator.peak();
        self.statistics.anomalies = *end.allocator.anomalies();
    }
}

impl StatisticsCollector {
    #[inline]
    fn pool(&mut self, small: bool) -> [&mut Stats; 2] {
        let Statistics { all, large, small: of_small, .. } = &mut self.statistics;
        [all, if small { of_small } else { large }]
    }

    #[inline]
    fn add(&mut self, small: bool, figure: Figure, amount: u64) {
        for stats in self.pool(small) {
            stats[figure as usize].add(amount);
        }
    }

    #[inline]
    fn subtract(&mut self, small: bool, figure: Figure, amount: u64) {
        for stats in self.pool(small) {
            stats[figure as usize].subtract(amount);
        }
    }

    /// The figures of the whole allocator, of large blocks and of small blocks.
    #[inline]
    pub(super) fn pools(&self) -> [Stats; 3] {
        [self.statistics.all, self.statistics.large, self.statistics.small]
    }

    #[inline]
    pub(super) fn observe(&mut self, allocator: &Allocator, e: &Event, change: &Change) {
        match change {
            Change::Alloc(id) => self.alloc(allocator, *id),
            Change::FreeRequested(id) => {
                let block = allocator.block(*id);
                self.subtract(block.segment.small, Figure::AllocatedBytes, block.size);
                self.subtract(block.segment.small, Figure::Allocation, 1);
            }
            Change::FreeCompleted(id, block) => self.free(allocator, *id, block),
            Change::SegmentGained => {
                let whole = e.action == Action::SegmentAlloc;
                self.statistics.all[Figure::ReservedBytes as usize].add(e.size);
                self.statistics.all[Figure::Segment as usize].add(u64::from(whole));
                self.unassigned.push((e.addr, e.size, whole));
                // For memory older than the recording, no allocation shows which pool it serves. The size of its block
                // decides.
                if e.flags.contains(Flags::PREEXISTING) {
                    self.assign_pool(allocator.find(e.addr).is_some_and(|id| allocator.block(id).segment.small));
                }
            }
            Change::SegmentLost => {
                // Memory obtained for a request that failed nevertheless counts for the large pool.
                self.assign_pool(false);
                let small = self.obtained.range(..=e.addr).next_back().is_some_and(|(_, small)| *small);
                self.subtract(small, Figure::ReservedBytes, e.size);
                if e.action == Action::SegmentFree {
                    self.obtained.remove(&e.addr);
                    self.subtract(small, Figure::Segment, 1);
                }
            }
            Change::Oom | Change::Snapshot | Change::None => {}
        }
    }

    /// Counts the segment of a block, for sources that report only blocks: there, each block has its own.
    pub(super) fn observe_own_segment(&mut self, allocator: &Allocator, change: &Change) {
        match change {
            Change::Alloc(id) => {
                let block = allocator.block(*id);
                self.add(block.segment.small, Figure::ReservedBytes, block.size);
                self.add(block.segment.small, Figure::Segment, 1);
            }
            Change::FreeCompleted(_, block) => {
                self.subtract(block.segment.small, Figure::ReservedBytes, block.size);
                self.subtract(block.segment.small, Figure::Segment, 1);
            }
            _ => {}
        }
    }

    /// Assigns the obtained memory to the pool of small or of large blocks.
    #[cold]
    fn assign_pool(&mut self, small: bool) {
        let pool = if small { &mut self.statistics.small } else { &mut self.statistics.large };
        for (addr, size, whole) in self.unassigned.drain(..) {
            self.obtained.insert(addr, small);
            pool[Figure::ReservedBytes as usize].add(size);
            pool[Figure::Segment as usize].add(u64::from(whole));
        }
    }

    #[inline]
    fn alloc(&mut self, allocator: &Allocator, id: BlockId) {
        let block = allocator.block(id);
        let small = block.segment.small;
        if !self.unassigned.is_empty() {
            self.assign_pool(small);
        }
        for stats in self.pool(small) {
            stats[Figure::AllocatedBytes as usize].add(block.size);
            stats[Figure::ActiveBytes as usize].add(block.size);
            stats[Figure::RequestedBytes as usize].add(block.requested);
            stats[Figure::Allocation as usize].add(1);
            stats[Figure::Active as usize].add(1);
        }
        if block.segment.expandable {
            return;
        }
        // Two free blocks are never adjacent. A free block behind this one is therefore the rest of the block that this
        // one was split from.
        let [before, behind] = allocator.neighbors(id);
        let rest = behind.filter(|(_, block)| !block.is_active());
        let beyond = match rest {
            Some((rest, _)) => allocator.neighbors(rest)[1].is_some(),
            None => behind.is_some(),
        };
        let was_split = before.is_some() || beyond;
        match rest.map(|(_, rest)| rest.size) {
            Some(_) if was_split => self.subtract(small, Figure::InactiveSplitBytes, block.size),
            Some(rest) => {
                self.add(small, Figure::InactiveSplitBytes, rest);
                self.add(small, Figure::InactiveSplit, 1);
            }
            None if was_split => {
                self.subtract(small, Figure::InactiveSplitBytes, block.size);
                self.subtract(small, Figure::InactiveSplit, 1);
            }
            None => {}
        }
    }

    #[inline]
    fn free(&mut self, allocator: &Allocator, id: BlockId, block: &Block) {
        let small = block.segment.small;
        self.subtract(small, Figure::ActiveBytes, block.size);
        self.subtract(small, Figure::RequestedBytes, block.requested);
        self.subtract(small, Figure::Active, 1);
        if block.segment.expandable || block.segment.implied {
            return;
        }
        // The blocks that this block was merged with were free split blocks beside it.
        let merged = allocator.block(id);
        let before = block.addr.saturating_sub(merged.addr);
        let behind = merged.size.saturating_sub(before + block.size);
        let is_split = allocator.neighbors(id).iter().any(Option::is_some);
        let removed = u64::from(before > 0) + u64::from(behind > 0);
        let added = if is_split { (1, merged.size) } else { (0, 0) };
        self.change(small, Figure::InactiveSplit, added.0, removed);
        self.change(small, Figure::InactiveSplitBytes, added.1, before + behind);
    }

    /// Counts a simultaneous increase and decrease as one change: their difference.
    #[inline]
    fn change(&mut self, small: bool, figure: Figure, added: u64, removed: u64) {
        match added.cmp(&removed) {
            std::cmp::Ordering::Greater => self.add(small, figure, added - removed),
            std::cmp::Ordering::Less => self.subtract(small, figure, removed - added),
            std::cmp::Ordering::Equal => {}
        }
    }
}
