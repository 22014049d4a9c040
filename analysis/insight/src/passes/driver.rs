//! Drives all passes over one device.

use memtrace_trace::event::{Action, Event};
use memtrace_trace::ids::FrameId;

use super::category::{BlockAllocation, BlockClassification, LifetimeEnd};
use super::device_blocks::{BlocksInUse, DeviceBlocks, Tracked};
use super::list::{DeviceAnalysis, Passes};
use super::pass::{
    BlockAllocated, BlockFreed, DeviceChange, FreeCompleted, LifetimeEnded, OutOfMemory, Pass, PassedRange,
    RecordingEnd, SegmentRequested, StayedMemory,
};
use super::phase::{EventClassification, ProgramPosition};
use memtrace_input::EventSource;
use memtrace_replay::{Allocator, BlockId, BlockState, Change, Replay, Usage};

/// Observes every block of a recording. An [`Analysis`](super::Analysis) itself keeps only the blocks that are
/// allocated.
pub trait BlockObserver {
    /// A block was allocated; `usage` includes it.
    #[inline]
    fn allocated(&mut self, _device: i16, _block: &BlockAllocation, _usage: &Usage) {}
    /// A block was freed by `free`, or, with `None`, was still allocated at the end. `evidence` is the frame that a
    /// frame rule matched, else `NONE`.
    fn lifetime_ended(
        &mut self,
        device: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        evidence: FrameId,
        free: Option<&Event>,
    );
    /// An event of any kind was processed. `replay` is the state after it, `now` the program's position.
    #[inline]
    fn event_processed(&mut self, _replay: &Replay, _e: &Event, _now: &ProgramPosition) {}
}

impl BlockObserver for () {
    #[inline]
    fn lifetime_ended(&mut self, _: i16, _: &BlockAllocation, _: &BlockClassification, _: FrameId, _: Option<&Event>) {}
}

/// One device while its events stream.
#[derive(Debug)]
pub(super) struct DeviceDriver {
    device: i16,
    source: EventSource,
    blocks: DeviceBlocks,
    passes: Passes,
    /// The time of the last allocation, in clock ticks.
    last_allocation: u64,
}

impl DeviceDriver {
    pub(super) fn new(device: i16, source: EventSource, blocks: DeviceBlocks, passes: Passes) -> DeviceDriver {
        DeviceDriver { device, source, blocks, passes, last_allocation: 0 }
    }

    pub(super) fn device(&self) -> i16 {
        self.device
    }

    /// `seq` of the event that led to the highest peak of allocated bytes so far.
    #[inline]
    pub(super) fn peak_seq(&self) -> u64 {
        self.passes.peak_seq()
    }

    /// A CUDA graph is captured into a private pool.
    pub(super) fn captured_into(&mut self, pool: u16) {
        self.blocks.captured_into(pool);
    }

    /// A range that the program names starts or ends.
    #[inline]
    pub(super) fn range(&mut self, e: &Event) {
        self.passes.range(e);
    }

    /// The first range of the requested name opens, or the last one ends.
    #[cold]
    pub(super) fn range_passed(&mut self, range: &PassedRange<'_>) {
        self.passes.range_passed(range);
    }

    /// The program came to a point after which memory should be released, for the time that counts.
    #[cold]
    pub(super) fn memory_stayed(&mut self, stayed: &StayedMemory<'_>) {
        self.passes.memory_stayed(stayed);
    }

    /// An event changed the device's allocator, which is at `slot` in the replay.
    #[inline]
    pub(super) fn observe(
        &mut self,
        (replay, slot): (&Replay, usize),
        tracked: &mut Tracked<'_>,
        observer: &mut dyn BlockObserver,
        e: &Event,
        change: Change,
    ) {
        let allocator = &replay.devices()[slot].allocator;
        self.passes.changed(&DeviceChange {
            source: self.source,
            allocator,
            stacks: tracked.tracker.stacks(),
            e,
            change: &change,
        });
        match change {
            Change::Alloc(id) => {
                let classification = tracked.tracker.observe(e);
                self.allocated((replay, slot), tracked, observer, e, id, &classification);
            }
            Change::FreeRequested(id) => {
                if tracked.tracker.is_earlier(e) {
                    return;
                }
                let classification = tracked.tracker.observe(e);
                self.freed(allocator.usage(), tracked, observer, e, id, &classification);
            }
            Change::FreeCompleted(id, block) => {
                self.passes.free_completed(&FreeCompleted { id, block: &block, ticks: e.ticks });
            }
            Change::SegmentGained if e.action == Action::SegmentAlloc => {
                self.passes.segment_requested(&SegmentRequested { e, now: tracked.tracker.now(), allocator });
            }
            Change::Oom => {
                let classification = tracked.tracker.observe(e);
                self.out_of_memory((replay, slot), tracked, e, &classification);
            }
            _ => {}
        }
    }

    #[inline]
    fn allocated(
        &mut self,
        (replay, slot): (&Replay, usize),
        tracked: &Tracked<'_>,
        observer: &mut dyn BlockObserver,
        e: &Event,
        id: BlockId,
        classification: &EventClassification,
    ) {
        let allocator = &replay.devices()[slot].allocator;
        let (block, mark) = self.blocks.allocated(tracked, e, id, allocator.block(id), classification);
        let usage = allocator.usage();
        observer.allocated(self.device, &block, usage);
        self.last_allocation = e.ticks;
        self.passes.allocated(&BlockAllocated {
            e,
            id,
            block: &block,
            mark,
            classification,
            now: tracked.tracker.now(),
            usage,
            allocator,
            physical: replay.physical(),
            is_earlier: tracked.tracker.is_earlier(e),
            micro_batches: tracked.tracker.micro_batches(),
        });
    }

    #[inline]
    fn freed(
        &mut self,
        usage: &Usage,
        tracked: &Tracked<'_>,
        observer: &mut dyn BlockObserver,
        e: &Event,
        id: BlockId,
        classification: &EventClassification,
    ) {
        self.blocks.freed(tracked, e);
        let now = tracked.tracker.now();
        let Some(block) = &self.blocks.of(id).copied() else { return };
        let is_truncated = self.blocks.is_truncated(block, now);
        let end = LifetimeEnd { now, is_truncated, free: Some(e) };
        let category = self.blocks.lifetime_ended(tracked, block, &end);
        let freed = BlockFreed {
            e,
            id,
            block,
            mark: self.blocks.mark(id),
            classification,
            facts: tracked.tracker.stacks().facts(e.stack),
            now,
            usage,
            is_truncated,
            may_be_teardown: self.blocks.may_be_teardown(block, classification, now),
        };
        self.passes.freed(&freed);
        self.lifetime_ended(block, category, Some(&freed), tracked, observer);
    }

    #[inline]
    fn lifetime_ended(
        &mut self,
        block: &BlockAllocation,
        classification: BlockClassification,
        freed: Option<&BlockFreed<'_>>,
        tracked: &Tracked<'_>,
        observer: &mut dyn BlockObserver,
    ) {
        let blocks = &self.blocks;
        let evidence = blocks.categorizer().evidence(block, &classification);
        observer.lifetime_ended(self.device, block, &classification, evidence, freed.map(|freed| freed.e));
        let now = tracked.tracker.now();
        self.passes.lifetime_ended(&LifetimeEnded { block, classification, evidence, now, freed, blocks, tracked });
    }

    fn out_of_memory(
        &mut self,
        (replay, slot): (&Replay, usize),
        tracked: &Tracked<'_>,
        e: &Event,
        classification: &EventClassification,
    ) {
        let now = tracked.tracker.now();
        let allocator = &replay.devices()[slot].allocator;
        self.passes.segment_requested(&SegmentRequested { e, now, allocator });
        let is_examined = self.blocks.out_of_memory(allocator, tracked);
        self.passes.out_of_memory(&OutOfMemory {
            e,
            classification,
            now,
            device: self.device,
            allocator,
            stacks: tracked.tracker.stacks(),
            physical: replay.physical(),
            in_use: is_examined.then_some(BlocksInUse { allocator, blocks: &self.blocks, tracked }),
        });
    }

    /// The results. `last` is the time and number of the recording's last event.
    pub(super) fn finish(
        mut self,
        allocator: &Allocator,
        tracked: &Tracked<'_>,
        last: &Event,
        observer: &mut dyn BlockObserver,
    ) -> DeviceAnalysis {
        let now = tracked.tracker.now();
        let end = LifetimeEnd { now, is_truncated: true, free: None };
        self.blocks.examine_allocated(allocator, tracked);
        // A block that waits for a stream was already freed by the program.
        for (id, _) in allocator.allocated().filter(|(_, block)| block.state == BlockState::Allocated) {
            let Some(block) = &self.blocks.of(id).copied() else { continue };
            let classification = self.blocks.categorizer().classify(&tracked.tracker, block, &end);
            self.lifetime_ended(block, classification, None, tracked, observer);
        }
        self.passes.finish(&RecordingEnd {
            last,
            allocator,
            in_use: BlocksInUse { allocator, blocks: &self.blocks, tracked },
            now,
            last_allocation: self.last_allocation,
            ended_steps: tracked.tracker.ended_steps(),
        });
        self.passes.results(self.device, self.source)
    }
}
