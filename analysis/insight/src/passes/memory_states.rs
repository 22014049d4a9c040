//! The blocks of a device at chosen points in time: its peak, its end, and what the analysis was asked about.

use memtrace_trace::event::Event;

use super::category::BlockAllocation;
use super::composition::Composition;
use super::modules::ModulePaths;
use super::open_ranges::RangeBoundary;
use super::pass::{BlockAllocated, LifetimeEnded, Pass, PassedPoints, RecordingEnd, RecordingStart};
use super::released::{ReleasedMemory, device_bytes};
use memtrace_replay::Usage;

/// The states of a device at chosen points in time.
#[derive(Clone, Debug, Default)]
pub struct MemoryStates {
    /// The blocks that were allocated at the peak of allocated bytes.
    pub peak: Composition,
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
    /// By point: the bytes of this process on the device when its range or call began.
    release_starts: Vec<u64>,
    /// The blocks that stayed where the call of a point may have ended.
    may_have_stayed: Vec<(usize, ReleasedMemory)>,
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
            release_starts: vec![0; start.release_points],
            ..StateCollector::default()
        }
    }

    fn points_passed(&mut self, points: &PassedPoints<'_>) {
        let usage = points.device.allocator.usage();
        match points.range {
            Some(RangeBoundary::Start) => self.range_started(points, usage),
            Some(RangeBoundary::End) => self.range_ended(usage),
            None => {}
        }
        self.released(points);
    }

    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let BlockAllocated { e, now, classification, usage, .. } = *allocated;
        let states = &mut self.states;
        if usage.allocated > states.peak.usage.allocated {
            states.peak.restart(e, *now, classification.phase, *usage);
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
        let MemoryStates { peak, step_peaks, range, released, .. } = &mut self.states;
        let maybe = self.may_have_stayed.iter_mut().map(|(_, released)| released);
        let released = released.iter_mut().chain(maybe).map(|released| &mut released.kept);
        let step_peaks = step_peaks.iter_mut().map(|(_, peak)| peak);
        let others = step_peaks.chain(range.as_mut().map(|range| &mut range.peak)).chain(released);
        let seq = block.seq;
        std::iter::once(peak).chain(others).filter(move |composition| composition.includes(seq))
    }

    fn range_started(&mut self, points: &PassedPoints<'_>, usage: &Usage) {
        self.in_range = true;
        let first = self.states.range.is_none();
        let new = || RangeMemory { start: usage.allocated, ..RangeMemory::default() };
        let range = self.states.range.get_or_insert_with(new);
        if first || usage.allocated > range.peak.usage.allocated {
            range.peak.restart(points.e, points.now, points.now.phase, *usage);
        }
    }

    fn range_ended(&mut self, usage: &Usage) {
        self.in_range = false;
        if let Some(range) = &mut self.states.range {
            range.end = usage.allocated;
        }
    }

    /// The program begins a range or a call after which memory should be released, or has ended it.
    fn released(&mut self, points: &PassedPoints<'_>) {
        let PassedPoints { e, now, replay, device, memories, .. } = *points;
        let e = &Event { device: device.device, ..*e };
        let is_in = |bits: u32, at: usize| bits >> at & 1 != 0;
        let passed = points.release;
        let maybe = &mut self.may_have_stayed;
        maybe.retain(|(at, _)| !is_in(passed.goes_on, *at));
        for (at, (released, start)) in self.states.released.iter_mut().zip(&mut self.release_starts).enumerate() {
            if is_in(passed.begun, at) {
                *start = device_bytes(replay, device);
            }
            if is_in(passed.may_have_ended, at) {
                let mut stayed = ReleasedMemory::default();
                stayed.reached(replay, device, (e, now), *start, || memories.state_at(replay, e));
                maybe.push((at, stayed));
            }
            if is_in(passed.ended, at) {
                match maybe.iter().position(|(one, _)| *one == at) {
                    Some(place) => released.reached_as(maybe.swap_remove(place).1),
                    None => released.reached(replay, device, (e, now), *start, || memories.state_at(replay, e)),
                }
            }
        }
    }
}
