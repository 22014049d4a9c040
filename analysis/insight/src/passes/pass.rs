//! The interface of a pass: a conclusion about one device, drawn from the stream of its allocations and frees.

use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::FrameId;

use super::category::{BlockAllocation, BlockClassification};
use super::composition::Composition;
use super::device_blocks::{BlocksInUse, DeviceBlocks, Tracked};
use super::mark::Mark;
use super::open_ranges::RangeBoundary;
use super::phase::{EventClassification, ProgramPosition};
pub(crate) use super::released::StayedMemory;
use super::replayed_memory::OomQuery;
use super::stacks::{StackFacts, StackTable};
use memtrace_input::EventSource;
use memtrace_replay::{Allocator, Block, BlockId, Change, PhysicalMemory, SMALL_SEGMENT, Usage};

/// Draws one conclusion about one device.
///
/// The memory of a pass grows with allocated blocks and distinct stacks, not with events. Each hook has a default that
/// does nothing.
pub(crate) trait Pass: Default {
    /// The pass before the first event.
    fn started(_start: &RecordingStart<'_>) -> Self {
        Self::default()
    }

    /// A range that the program names starts or ends.
    #[inline]
    fn range(&mut self, _e: &Event) {}

    /// The first range of the requested name opens, or the last one ends.
    fn range_passed(&mut self, _range: &PassedRange<'_>) {}

    /// The program came to a point after which memory should be released, for the time that counts.
    fn memory_stayed(&mut self, _stayed: &StayedMemory<'_>) {}

    /// An event changed the device's allocator. Called before the other hooks of the event.
    #[inline]
    fn changed(&mut self, _change: &DeviceChange<'_>) {}

    /// A block was allocated.
    #[inline]
    fn allocated(&mut self, _allocated: &BlockAllocated<'_>) {}

    /// The program freed a block.
    #[inline]
    fn freed(&mut self, _freed: &BlockFreed<'_>) {}

    /// The program freed a block, or the recording ended while it was in use. So the category is known.
    #[inline]
    fn lifetime_ended(&mut self, _ended: &LifetimeEnded<'_>) {}

    /// A free was completed: the memory of the block can be reused.
    #[inline]
    fn free_completed(&mut self, _completed: &FreeCompleted<'_>) {}

    /// The caching allocator requested a segment from CUDA, whether it succeeded or not.
    fn segment_requested(&mut self, _requested: &SegmentRequested<'_>) {}

    /// A request ran out of memory.
    fn out_of_memory(&mut self, _error: &OutOfMemory<'_>) {}

    /// The recording ended, and so did all lifetimes.
    fn finish(&mut self, _end: &RecordingEnd<'_>) {}
}

/// Declares a struct that has a field for each pass, and is a pass itself: it calls all of them in this order.
macro_rules! pass_group {
    ($(#[$meta:meta])* $visibility:vis struct $group:ident { $($name:ident: $pass:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default)]
        $visibility struct $group {
            $($name: $pass,)*
        }

        impl $crate::passes::pass::Pass for $group {
            fn started(start: &$crate::passes::pass::RecordingStart<'_>) -> $group {
                $group { $($name: $crate::passes::pass::Pass::started(start),)* }
            }

            #[inline]
            fn range(&mut self, e: &memtrace_trace::event::Event) {
                $($crate::passes::pass::Pass::range(&mut self.$name, e);)*
            }

            $crate::passes::pass::pass_group!(@hooks [$($name)*]
                range_passed(PassedRange)
                memory_stayed(StayedMemory)
                changed(DeviceChange)
                allocated(BlockAllocated)
                freed(BlockFreed)
                lifetime_ended(LifetimeEnded)
                free_completed(FreeCompleted)
                segment_requested(SegmentRequested)
                out_of_memory(OutOfMemory)
                finish(RecordingEnd)
            );
        }
    };
    (@hooks $names:tt $($hook:ident($event:ident))*) => {
        $($crate::passes::pass::pass_group!(@hook $names $hook $event);)*
    };
    (@hook [$($name:ident)*] $hook:ident $event:ident) => {
        #[inline]
        fn $hook(&mut self, event: &$crate::passes::pass::$event<'_>) {
            $($crate::passes::pass::Pass::$hook(&mut self.$name, event);)*
        }
    };
}

pub(crate) use pass_group;

/// The facts that are known before the first event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordingStart<'a> {
    pub(crate) definitions: &'a Definitions,
    /// The program calls a model and never trains.
    pub(crate) is_inference: bool,
    /// The number of steps whose events the recording has dropped.
    pub(crate) dropped_steps: u32,
    /// The steps whose peaks are requested.
    pub(crate) step_peaks: &'a [u32],
    /// The number of points after which memory should be released.
    pub(crate) release_points: usize,
    /// The points in time to explain.
    pub(crate) queries: &'a [OomQuery],
}

/// A boundary of the ranges of the requested name.
pub(crate) struct PassedRange<'a> {
    pub(crate) e: &'a Event,
    pub(crate) now: ProgramPosition,
    pub(crate) boundary: RangeBoundary,
    pub(crate) usage: &'a Usage,
}

/// A change of a device's allocator by an event.
pub(crate) struct DeviceChange<'a> {
    /// The event source that describes the device.
    pub(crate) source: EventSource,
    /// The state after the event.
    pub(crate) allocator: &'a Allocator,
    pub(crate) stacks: &'a StackTable,
    pub(crate) e: &'a Event,
    pub(crate) change: &'a Change,
}

/// The allocation of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockAllocated<'a> {
    pub(crate) e: &'a Event,
    pub(crate) id: BlockId,
    pub(crate) block: &'a BlockAllocation,
    pub(crate) mark: Mark,
    pub(crate) classification: &'a EventClassification,
    pub(crate) now: &'a ProgramPosition,
    /// The totals of the device after the allocation.
    pub(crate) usage: &'a Usage,
    /// The state after the allocation.
    pub(crate) allocator: &'a Allocator,
    pub(crate) physical: &'a PhysicalMemory,
    /// Whether an event allocated it that the recording has dropped.
    pub(crate) is_earlier: bool,
    /// The number of micro-batches that the current step has had.
    pub(crate) micro_batches: u32,
}

/// The program's free of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockFreed<'a> {
    pub(crate) e: &'a Event,
    pub(crate) id: BlockId,
    pub(crate) block: &'a BlockAllocation,
    pub(crate) mark: Mark,
    pub(crate) classification: &'a EventClassification,
    /// The facts about the stack that frees the block.
    pub(crate) facts: &'a StackFacts,
    pub(crate) now: &'a ProgramPosition,
    /// The totals of the device after the free.
    pub(crate) usage: &'a Usage,
    /// Whether an out-of-memory error that unwinds the program frees the block.
    pub(crate) is_truncated: bool,
    /// Whether the free belongs to the program's teardown if no allocation follows.
    pub(crate) may_be_teardown: bool,
}

/// The end of a block's lifetime.
pub(crate) struct LifetimeEnded<'a> {
    pub(crate) block: &'a BlockAllocation,
    pub(crate) classification: BlockClassification,
    /// The frame that a frame rule of categories matched, else `NONE`.
    pub(crate) evidence: FrameId,
    pub(crate) now: &'a ProgramPosition,
    /// The free. `None` at the end of the recording.
    pub(crate) freed: Option<&'a BlockFreed<'a>>,
    pub(crate) blocks: &'a DeviceBlocks,
    pub(crate) tracked: &'a Tracked<'a>,
}

impl LifetimeEnded<'_> {
    /// Adds the block to a composition.
    pub(crate) fn add_to(&self, composition: &mut Composition) {
        self.blocks.add_to(composition, self.block, self.classification.category, self.tracked);
    }
}

/// The completion of a free.
pub(crate) struct FreeCompleted<'a> {
    pub(crate) id: BlockId,
    /// The block before it was merged with free neighbors.
    pub(crate) block: &'a Block,
    pub(crate) ticks: u64,
}

/// A request for a segment.
pub(crate) struct SegmentRequested<'a> {
    pub(crate) e: &'a Event,
    pub(crate) now: &'a ProgramPosition,
    /// The state after the request.
    pub(crate) allocator: &'a Allocator,
}

impl SegmentRequested<'_> {
    /// Whether CUDA refused the memory.
    pub(crate) fn failed(&self) -> bool {
        self.e.action == Action::Oom
    }

    /// The free bytes of all segments before the request, if it is for large blocks of the default pool and they are at
    /// least as many.
    pub(crate) fn free_that_suffices(&self) -> Option<u64> {
        let (bytes, usage) = (self.e.size, self.allocator.usage());
        // Small and large blocks never share segments. Private pools do not share segments either.
        let is_large = bytes > SMALL_SEGMENT && self.e.pool == 0;
        let reserved_before = usage.reserved.saturating_sub(if self.failed() { 0 } else { bytes });
        Some(reserved_before.saturating_sub(usage.active)).filter(|free| is_large && *free >= bytes)
    }
}

/// An out-of-memory error.
#[derive(Clone, Copy)]
pub(crate) struct OutOfMemory<'a> {
    pub(crate) e: &'a Event,
    pub(crate) classification: &'a EventClassification,
    pub(crate) now: &'a ProgramPosition,
    pub(crate) device: i16,
    pub(crate) allocator: &'a Allocator,
    pub(crate) stacks: &'a StackTable,
    pub(crate) physical: &'a PhysicalMemory,
    /// The blocks that were in use. `None` after very many errors.
    pub(crate) in_use: Option<BlocksInUse<'a>>,
}

/// The end of a recording.
#[derive(Clone, Copy)]
pub(crate) struct RecordingEnd<'a> {
    /// The number and the time of the last event.
    pub(crate) last: &'a Event,
    pub(crate) allocator: &'a Allocator,
    pub(crate) in_use: BlocksInUse<'a>,
    pub(crate) now: &'a ProgramPosition,
    /// The time of the device's last allocation, in clock ticks.
    pub(crate) last_allocation: u64,
    /// How many steps have ended according to profiler ranges.
    pub(crate) ended_steps: u32,
}
