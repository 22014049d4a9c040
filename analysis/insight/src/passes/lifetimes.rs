//! The lifetimes of a recording's blocks in a compact form, for replays with changes.
//!
//! [`LifetimeCollector`] observes the analysis. It keeps every block of a short recording. Of a long one it keeps the
//! blocks that were allocated in some steps: the first two, the one with the highest peak, and the latest two. At the
//! times of these steps, the kept blocks are all blocks that were allocated. At other times some are missing.

use memtrace_trace::event::{Event, Flags};
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use super::category::{BlockAllocation, BlockClassification, Category, is_without_gradients};
use super::driver::BlockObserver;
use super::phase::Phase;
use memtrace_replay::Usage;

/// The unit of block sizes, in bytes: PyTorch's allocator rounds all sizes to multiples of it.
const UNIT: u64 = 512;
/// More blocks than this are kept only if the kept steps have them, and never more than `MOST_BLOCKS`. They take 40
/// bytes each.
const MAX_BLOCKS: usize = 100_000;
const MOST_BLOCKS: usize = 4 * MAX_BLOCKS;
/// The steps from the start that are kept. An optimizer allocates its state in the first one.
const FIRST_STEPS: u32 = 2;
/// The steps at the end that are kept: the running one, and the one before, which shows the rest of a step that an
/// error interrupts.
const LATEST_STEPS: usize = 2;
/// [`BlockLifetime::freed`] of a block that was never freed.
pub const NEVER: u32 = u32::MAX;
/// [`LifetimeStart::step`] of a block that was allocated before the first step.
pub const BEFORE_STEPS: u32 = u32::MAX;

/// How a block's lifetime begins. 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LifetimeStart {
    /// The stack of the allocation.
    pub stack: StackId,
    /// The context of the allocation: an autograd node or a module's call.
    pub context: ContextId,
    /// The step of the allocation; [`BEFORE_STEPS`] before the first.
    pub step: u32,
    /// The number of backward passes that had begun at the allocation, modulo 65,536.
    pub backward_passes: u16,
    /// The phase of the allocation.
    pub phase: Phase,
    /// Whether gradients were off at the allocation.
    pub is_without_gradients: bool,
}

/// One block: when it was allocated and freed, and what it is. 40 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockLifetime {
    /// `seq` of the allocation.
    pub allocated: u32,
    /// How its lifetime begins.
    pub start: LifetimeStart,
    /// `seq` of the program's free; [`NEVER`] without one.
    pub freed: u32,
    /// The context of the free.
    pub freed_context: ContextId,
    /// Whether a backward pass freed the block.
    pub is_freed_in_backward: bool,
    /// The category.
    pub category: Category,
    /// The index in [`BlockLifetimes::stream_pools`].
    pub stream_pool: u8,
    units: u32,
    /// The bytes of the block beyond the request.
    slack: u32,
}

impl BlockLifetime {
    /// The size in bytes, rounded as the allocator rounded.
    pub fn size(&self) -> u64 {
        u64::from(self.units) * UNIT
    }

    /// The requested size in bytes.
    pub fn requested(&self) -> u64 {
        self.size().saturating_sub(self.slack.into())
    }

    /// A block of this size that is never freed, with defaults for everything else.
    pub(crate) fn of_size(allocated: u32, requested: u64) -> BlockLifetime {
        let units = u32::try_from(requested.div_ceil(UNIT)).unwrap_or(u32::MAX);
        BlockLifetime {
            allocated,
            start: LifetimeStart {
                stack: StackId::NONE,
                context: ContextId::NONE,
                step: BEFORE_STEPS,
                backward_passes: 0,
                phase: Phase::Other,
                is_without_gradients: false,
            },
            freed: NEVER,
            freed_context: ContextId::NONE,
            is_freed_in_backward: false,
            category: Category::Unknown,
            stream_pool: 0,
            units,
            slack: (u64::from(units) * UNIT).saturating_sub(requested) as u32,
        }
    }

    /// Whether the block was allocated when the event `seq` had happened.
    pub fn includes(&self, seq: u32) -> bool {
        self.allocated <= seq && seq < self.freed
    }
}

/// One step, or the time before the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepWindow {
    /// The step; [`BEFORE_STEPS`] before the first.
    pub step: u32,
    /// `seq` of its first allocation.
    pub first: u32,
    /// `seq` of the last event before the next step; [`NEVER`] for the last step.
    pub last: u32,
    /// The highest allocated bytes after an allocation of the step.
    pub peak: u64,
}

impl StepWindow {
    fn overlaps(&self, block: &BlockLifetime) -> bool {
        block.allocated <= self.last && block.freed > self.first
    }
}

/// The lifetimes of one device's blocks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BlockLifetimes {
    /// The device ordinal.
    pub device: i16,
    /// The blocks in the order of their allocation.
    pub blocks: Vec<BlockLifetime>,
    /// Stream and private pool of blocks.
    pub stream_pools: Vec<(u64, u16)>,
    /// The times for which `blocks` has every block, in order.
    pub windows: Vec<StepWindow>,
    /// Whether `blocks` has every block of the recording.
    pub is_whole: bool,
}

/// Collects the lifetimes of all devices.
#[derive(Clone, Debug)]
pub struct LifetimeCollector {
    devices: Vec<DeviceCollector>,
    max_blocks: usize,
    most_blocks: usize,
}

#[derive(Clone, Debug, Default)]
struct DeviceCollector {
    device: i16,
    max_blocks: usize,
    most_blocks: usize,
    blocks: Vec<BlockLifetime>,
    stream_pools: Vec<(u64, u16)>,
    /// The steps for which all blocks are kept; the last one is running.
    windows: Vec<StepWindow>,
    is_pruned: bool,
    /// One step alone has too many blocks, or a number does not fit.
    is_overflowed: bool,
}

impl Default for LifetimeCollector {
    fn default() -> LifetimeCollector {
        LifetimeCollector { devices: Vec::new(), max_blocks: MAX_BLOCKS, most_blocks: MOST_BLOCKS }
    }
}

impl LifetimeCollector {
    fn device(&mut self, device: i16) -> &mut DeviceCollector {
        let index = self.devices.iter().position(|one| one.device == device).unwrap_or_else(|| {
            let (max_blocks, most_blocks) = (self.max_blocks, self.most_blocks);
            self.devices.push(DeviceCollector { device, max_blocks, most_blocks, ..DeviceCollector::default() });
            self.devices.len() - 1
        });
        &mut self.devices[index]
    }

    /// The lifetimes by device. A device without an entry had too many blocks in one step.
    pub fn finish(self) -> Vec<BlockLifetimes> {
        let finish = |mut device: DeviceCollector| {
            device.blocks.sort_unstable_by_key(|block| block.allocated);
            BlockLifetimes {
                device: device.device,
                blocks: device.blocks,
                stream_pools: device.stream_pools,
                windows: device.windows,
                is_whole: !device.is_pruned,
            }
        };
        self.devices.into_iter().filter(|device| !device.is_overflowed).map(finish).collect()
    }
}

impl DeviceCollector {
    fn stream_pool(&mut self, stream_pool: (u64, u16)) -> Option<u8> {
        let index = self.stream_pools.iter().position(|one| *one == stream_pool).unwrap_or_else(|| {
            self.stream_pools.push(stream_pool);
            self.stream_pools.len() - 1
        });
        u8::try_from(index).ok()
    }

    fn step_begins(&mut self, step: u32, seq: u32) {
        if let Some(last) = self.windows.last_mut() {
            last.last = seq.saturating_sub(1);
        }
        self.windows.push(StepWindow { step, first: seq, last: NEVER, peak: 0 });
    }

    /// Leaves only the steps of the module's documentation, and the blocks that were allocated in them.
    fn prune(&mut self) {
        let highest = self.windows.iter().max_by_key(|window| (window.peak, std::cmp::Reverse(window.first))).copied();
        let latest = self.windows.len().saturating_sub(LATEST_STEPS);
        let latest: Vec<StepWindow> = self.windows.drain(latest..).collect();
        self.windows.retain(|window| window.step < FIRST_STEPS || Some(*window) == highest);
        self.windows.extend(latest);
        let windows = &self.windows;
        self.blocks.retain(|block| windows.iter().any(|window| window.overlaps(block)));
        self.is_pruned = true;
        if self.blocks.len() > self.max_blocks / 4 * 3 {
            self.max_blocks *= 2;
        }
        if self.max_blocks > self.most_blocks {
            self.is_overflowed = true;
            self.blocks = Vec::new();
        }
    }
}

impl BlockObserver for LifetimeCollector {
    #[inline]
    fn allocated(&mut self, device: i16, block: &BlockAllocation, usage: &Usage) {
        let device = self.device(device);
        let step = block.position.step.unwrap_or(BEFORE_STEPS);
        let Ok(seq) = u32::try_from(block.seq) else {
            device.is_overflowed = true;
            return;
        };
        if device.windows.last().is_none_or(|window| window.step != step) {
            device.step_begins(step, seq);
        }
        if let Some(window) = device.windows.last_mut() {
            window.peak = window.peak.max(usage.allocated);
        }
    }

    #[inline]
    fn lifetime_ended(
        &mut self,
        device: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        _: FrameId,
        free: Option<&Event>,
    ) {
        let device = self.device(device);
        if device.is_overflowed {
            return;
        }
        let freed = free.map_or(Some(NEVER), |e| u32::try_from(e.seq).ok());
        let numbers = (
            u32::try_from(block.seq),
            freed,
            u32::try_from(block.memory.size / UNIT),
            device.stream_pool((block.memory.stream, block.memory.pool)),
        );
        let (Ok(allocated), Some(freed), Ok(units), Some(stream_pool)) = numbers else {
            device.is_overflowed = true;
            return;
        };
        device.blocks.push(BlockLifetime {
            allocated,
            start: LifetimeStart {
                stack: block.site.stack,
                context: block.site.event_context,
                step: block.position.step.unwrap_or(BEFORE_STEPS),
                backward_passes: block.position.backward_passes as u16,
                phase: block.phase,
                is_without_gradients: is_without_gradients(block.flags),
            },
            freed,
            freed_context: free.map_or(ContextId::NONE, |e| e.context),
            is_freed_in_backward: free.is_some_and(|e| e.flags.contains(Flags::IN_BACKWARD)),
            category: classification.category,
            stream_pool,
            units,
            slack: u32::try_from(block.memory.size.saturating_sub(block.memory.requested)).unwrap_or(0),
        });
        if device.blocks.len() >= device.max_blocks {
            device.prune();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::CategoryRuleId;

    fn run(steps: u32, per_step: u64, max_blocks: usize) -> BlockLifetimes {
        let mut collector = LifetimeCollector { max_blocks, most_blocks: max_blocks, ..LifetimeCollector::default() };
        let classification =
            BlockClassification { category: Category::Activation, rule: CategoryRuleId::ActivationForward };
        let mut seq = 0;
        for step in 0..steps {
            for i in 0..per_step {
                seq += 1;
                let mut block = BlockAllocation::for_tests(seq);
                block.position.step = Some(step);
                let allocated = if step == 5 { 900 + i } else { 100 + i };
                collector.allocated(0, &block, &Usage { allocated, ..Usage::default() });
                let free = Event { seq: seq + 1, ..Event::EMPTY };
                seq += 1;
                collector.lifetime_ended(0, &block, &classification, FrameId::NONE, Some(&free));
            }
        }
        collector.finish().into_iter().next().unwrap_or_default()
    }

    #[test]
    fn a_block_needs_forty_bytes() {
        assert_eq!(std::mem::size_of::<BlockLifetime>(), 40);
    }

    #[test]
    fn a_short_recording_is_kept_whole() {
        let all = run(9, 10, 1000);
        assert!(all.is_whole);
        assert_eq!((all.blocks.len(), all.windows.len()), (90, 9));
    }

    #[test]
    fn a_long_recording_keeps_some_steps() {
        let some = run(100, 10, 100);
        assert!(!some.is_whole);
        let steps: Vec<u32> = some.windows.iter().map(|window| window.step).collect();
        assert!(steps.starts_with(&[0, 1, 5]) && steps.last() == Some(&99), "{steps:?}");
        for window in &some.windows {
            assert_eq!(some.blocks.iter().filter(|block| block.start.step == window.step).count(), 10, "{window:?}");
        }
        assert!(some.blocks.len() <= 100);
    }

    #[test]
    fn a_step_with_too_many_blocks_is_not_kept() {
        assert_eq!(run(1, 200, 100), BlockLifetimes::default());
    }
}
