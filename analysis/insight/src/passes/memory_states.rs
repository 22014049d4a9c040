//! The blocks of a device at chosen points in time: its peak, its end, and what the analysis was asked about.

use super::category::BlockAllocation;
use super::composition::Composition;
use super::modules::ModulePaths;
use super::open_ranges::RangeBoundary;
use super::pass::{BlockAllocated, LifetimeEnded, Pass, PassedRange, RecordingEnd, RecordingStart, StayedMemory};
use super::phase::Phase;
use super::released::ReleasedMemory;
use memtrace_replay::Usage;

/// The states of a device at chosen points in time.
#[derive(Clone, Debug, Default)]
pub struct MemoryStates {
    /// The blocks that were allocated at the peak of allocated bytes.
    pub peak: Composition,
    /// The blocks that were allocated at the peak of each phase of the first step. Empty for a phase without
    /// allocations.
    pub first_step: [Composition; Phase::ALL.len()],
    /// The blocks that were allocated at the end.
    pub end: Composition,
    /// The blocks that were allocated at the peaks of the requested steps. Empty for a step that never came.
    pub step_peaks: Vec<(u32, Composition)>,
    /// The states while a range of the requested name was open. Absent without one.
    pub range: Option<RangeMemory>,
    /// By requested point: what stayed after it.
    pub released: Vec<ReleasedMemory>,
    /// The paths of the modules that the compositions of the device refer to.
    pub module_paths: ModulePaths,
}

/// The memory of a device in all ranges of one name.
#[derive(Clone, Debug, Default)]
pub struct RangeMemory {
    /// The allocated bytes at the start of the first range.
    pub start: u64,
    /// The allocated bytes at the end of the last range, or at the end of the recording if a range is still open.
    pub end: u64,
    /// The blocks that were allocated when the most bytes were allocated inside. Blocks from before count.
    pub peak: Composition,
}

/// Collects [`MemoryStates`].
#[derive(Clone, Debug, Default)]
pub(crate) struct StateCollector {
    states: MemoryStates,
    /// Whether a range of the requested name is open.
    in_range: bool,
}

impl From<StateCollector> for MemoryStates {
    fn from(collector: StateCollector) -> MemoryStates {
        collector.states
    }
}

impl Pass for StateCollector {
    fn started(start: &RecordingStart<'_>) -> StateCollector {
        StateCollector {
            states: MemoryStates {
                step_peaks: start.step_peaks.iter().map(|step| (*step, Composition::default())).collect(),
                released: vec![ReleasedMemory::default(); start.release_points],
                ..MemoryStates::default()
            },
            ..StateCollector::default()
        }
    }

    fn range_passed(&mut self, range: &PassedRange<'_>) {
        match range.boundary {
            RangeBoundary::Start => self.range_started(range),
            RangeBoundary::End => self.range_ended(range.usage),
        }
    }

    fn memory_stayed(&mut self, stayed: &StayedMemory<'_>) {
        if let Some(released) = self.states.released.get_mut(stayed.release.point) {
            *released = ReleasedMemory::of(stayed);
        }
    }

    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let BlockAllocated { e, now, classification, usage, .. } = *allocated;
        let states = &mut self.states;
        if usage.allocated > states.peak.usage.allocated {
            states.peak.restart(e, *now, classification.phase, *usage);
        }
        if now.step == Some(0) {
            let peak = &mut states.first_step[classification.phase as usize];
            if usage.allocated > peak.usage.allocated {
                peak.restart(e, *now, classification.phase, *usage);
            }
        }
        for (step, peak) in &mut states.step_peaks {
            if now.step == Some(*step) && usage.allocated > peak.usage.allocated {
                peak.restart(e, *now, classification.phase, *usage);
            }
        }
        if let Some(range) = states.range.as_mut().filter(|_| self.in_range)
            && usage.allocated > range.peak.usage.allocated
        {
            range.peak.restart(e, *now, classification.phase, *usage);
        }
    }

    #[inline]
    fn lifetime_ended(&mut self, ended: &LifetimeEnded<'_>) {
        self.compositions_with(ended.block).for_each(|composition| ended.add_to(composition));
    }

    fn finish(&mut self, end: &RecordingEnd<'_>) {
        if self.in_range {
            self.range_ended(end.allocator.usage());
        }
        self.states.end = end.in_use.composition(end.last, end.now.phase);
        self.states.module_paths = end.in_use.take_module_paths();
    }
}

impl StateCollector {
    /// `seq` of the event that led to the highest peak so far.
    #[inline]
    pub(super) fn peak_seq(&self) -> u64 {
        self.states.peak.seq
    }

    /// The compositions at whose points in time the block was allocated.
    #[inline]
    fn compositions_with(&mut self, block: &BlockAllocation) -> impl Iterator<Item = &mut Composition> {
        let MemoryStates { peak, first_step, step_peaks, range, released, .. } = &mut self.states;
        let released = released.iter_mut().map(|released| &mut released.kept);
        let step_peaks = step_peaks.iter_mut().map(|(_, peak)| peak);
        let others = step_peaks.chain(range.as_mut().map(|range| &mut range.peak)).chain(released);
        let seq = block.seq;
        std::iter::once(peak).chain(first_step).chain(others).filter(move |composition| composition.includes(seq))
    }

    fn range_started(&mut self, started: &PassedRange<'_>) {
        self.in_range = true;
        let PassedRange { e, now, usage, .. } = *started;
        let first = self.states.range.is_none();
        let new = || RangeMemory { start: usage.allocated, ..RangeMemory::default() };
        let range = self.states.range.get_or_insert_with(new);
        if first || usage.allocated > range.peak.usage.allocated {
            range.peak.restart(e, now, now.phase, *usage);
        }
    }

    fn range_ended(&mut self, usage: &Usage) {
        self.in_range = false;
        if let Some(range) = &mut self.states.range {
            range.end = usage.allocated;
        }
    }
}
