//! Analyzes one process in a single streaming pass: replay, phases, and every conclusion that depends on them.

use std::collections::BTreeMap;
use std::sync::Arc;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{FrameId, StackId};

use super::call_tree::CallTree;
use super::calls::Calls;
use super::category::{BlockAllocation, BlockClassification, Categorizer, Category, CategoryRuleUses, LifetimeEnd};
use super::composition::{Amount, Composition, ModuleKey, Origin};
use super::cuda_graphs::CudaGraphs;
use super::custom::CustomCategorizer;
use super::device_memory::{DeviceMemories, DeviceMemory};
use super::growth::Growth;
use super::labels::{LabelTable, OpenRanges};
use super::modules::ModulePaths;
use super::oom::{Oom, OomLog};
use super::phase::{EventClassification, Phase, PhaseTracker, ProgramPosition};
use super::phase_rule_uses::PhaseRuleUses;
use super::phase_table::PhaseTable;
use super::released::{self, Passed, ReleasePoint, ReleasePoints, ReleasedMemory, device_bytes};
use super::reserved::Reserved;
use super::rest_of_step::StepStarts;
use super::statistics::Statistics;
use super::step_inputs::StepInputs;
use crate::diagnostics::{BlockEvent, DeviceFacts, Diagnostics, Issue, IssueInputs, RecordingStart};
use crate::rules::CustomRules;
use memtrace_input::{CompileContexts, EventSource, LostEvents, Recording, TraceIndex};
use memtrace_replay::{
    Allocator, Change, MemoryLocation, Names, Owner, OwnerUsage, Peak, Replay, UnmappedBytes, Usage,
};

/// The maximum number of origins to report that block segments at an out-of-memory error.
const MAX_BLOCKERS: usize = 10;

/// The results for one device.
#[derive(Clone, Debug)]
pub struct DeviceAnalysis {
    /// The device ordinal; -1 for the CPU.
    pub device: i16,
    /// The event source that describes this device.
    pub source: EventSource,
    /// The blocks that were allocated at the peak of allocated bytes.
    pub peak: Composition,
    /// The blocks that were allocated at the end.
    pub end: Composition,
    /// The blocks that were allocated at the peaks of the requested steps. Empty for a step that never came.
    pub step_peaks: Vec<(u32, Composition)>,
    /// What happened while a range of the requested name was open. Absent without one.
    pub range: Option<RangeMemory>,
    /// By requested point: what stayed after it.
    pub released: Vec<ReleasedMemory>,
    /// The highest totals, each at its own point in time.
    pub peaks: Peak,
    /// What each phase did.
    pub table: PhaseTable,
    /// What happened in the ranges that the program named.
    pub labels: LabelTable,
    /// What the calls of the program's own functions did.
    pub calls: Calls,
    /// What grew after the first step.
    pub growth: Growth,
    /// What each step loads.
    pub step_inputs: StepInputs,
    /// The out-of-memory errors.
    pub ooms: OomLog,
    /// Which rules decided phases.
    pub phase_rules: PhaseRuleUses,
    /// Which rules decided categories.
    pub category_rules: CategoryRuleUses,
    /// By rule of the user's file: what it decided. The last entry is what no rule matches. Empty without a file.
    pub custom_rules: Vec<Amount>,
    /// Events that contradict the replayed state.
    pub anomalies: memtrace_replay::Anomalies,
    /// The values that `torch.cuda.memory_stats` would return at the end.
    pub statistics: Statistics,
    /// What finds issues.
    pub diagnostics: Diagnostics,
    /// The paths of the modules that the compositions here refer to.
    pub module_paths: ModulePaths,
    /// By point: the bytes of this process on the device when its range or call began.
    release_starts: Vec<u64>,
    /// What stayed where the call of a point may have ended.
    may_have_stayed: Vec<(usize, ReleasedMemory)>,
    /// Whether a range of the requested name is open.
    in_range: bool,
    last_ticks: u64,
    /// By block id: the allocation of the block. Valid for allocated blocks.
    allocations: Vec<BlockAllocation>,
    pending_frees: Vec<PendingFree>,
    step_starts: StepStarts,
    categorizer: Categorizer,
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

/// The program's position, the tensor names and the user's rules.
struct Tracked<'a> {
    tracker: PhaseTracker,
    names: Option<&'a Names>,
    custom: Option<CustomCategorizer<'a>>,
    compile_contexts: &'a CompileContexts,
}

/// What an analysis does besides.
#[derive(Clone, Copy, Debug, Default)]
pub struct AnalysisOptions<'a> {
    /// Also records, for each of these steps, the blocks that were allocated at the step's peak.
    pub step_peaks: &'a [u32],
    /// Also records what happened while a range of this name was open.
    pub range: Option<&'a str>,
    /// Also records what stayed after each of these points.
    pub released_after: &'a [ReleasePoint],
    /// Also divides the blocks into the custom categories of these rules.
    pub custom_rules: Option<&'a CustomRules>,
}

/// Observes every block of a recording. An [`Analysis`] itself keeps only the blocks that are allocated.
pub trait BlockObserver {
    /// A block was allocated; `usage` includes it.
    #[inline]
    fn allocated(&mut self, _device: i16, _block: &BlockAllocation, _usage: &Usage) {}
    /// A block was freed by `free`, or, with `None`, was still allocated at the end. `evidence`: the frame that a frame
    /// rule matched, else `NONE`.
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

/// A free that belongs to the program's teardown if no allocation follows ([`EventClassification::may_be_teardown`]).
#[derive(Clone, Copy, Debug)]
struct PendingFree {
    block: BlockAllocation,
    category: Category,
    position: ProgramPosition,
    phase: Option<Phase>,
}

/// The results for one process.
#[derive(Clone, Debug, Default)]
pub struct Analysis {
    /// The devices, by ordinal.
    pub devices: Vec<DeviceAnalysis>,
    /// What each owner held of each device's memory and of page-locked host memory.
    pub owners: BTreeMap<(MemoryLocation, Owner), OwnerUsage>,
    /// By device: its whole memory. Without a device whose memory in use was never read.
    pub device_memory: BTreeMap<i16, DeviceMemory>,
    /// The sum over all owners, by location.
    pub locations: BTreeMap<MemoryLocation, OwnerUsage>,
    /// By stack: by how many requested bytes a block of it grows with each call that adds a token to a cache.
    pub cache_growth: BTreeMap<StackId, u64>,
    /// The CUDA graphs, and the private pools of PyTorch's allocator.
    pub cuda_graphs: CudaGraphs,
    /// By device: how much of the segments of PyTorch's allocator had no device memory.
    pub unmapped_segments: BTreeMap<i16, UnmappedBytes>,
    /// CUDA calls that failed.
    pub failed_calls: u64,
    /// CUDA frees of memory whose allocation was not recorded.
    pub unmatched_cuda_frees: u64,
    /// Events that could not be decoded.
    pub lost: LostEvents,
}

impl Analysis {
    /// Streams a recording once. `progress` receives the number of events read so far.
    pub fn of(recording: &dyn Recording, trace_index: &TraceIndex, progress: &mut dyn FnMut(u64)) -> Analysis {
        Analysis::with_observer(recording, trace_index, &Names::of(recording), &mut (), progress)
    }

    /// Takes `names` that the caller has already read. `observer` observes every block, `progress` the number of events
    /// read so far.
    pub fn with_observer(
        recording: &dyn Recording,
        trace_index: &TraceIndex,
        names: &Names,
        observer: &mut dyn BlockObserver,
        progress: &mut dyn FnMut(u64),
    ) -> Analysis {
        Analysis::with_options(recording, trace_index, names, &AnalysisOptions::default(), observer, progress)
    }

    /// [`Self::with_observer`], with what the options add.
    pub fn with_options(
        recording: &dyn Recording,
        trace_index: &TraceIndex,
        names: &Names,
        options: &AnalysisOptions<'_>,
        observer: &mut dyn BlockObserver,
        progress: &mut dyn FnMut(u64),
    ) -> Analysis {
        let definitions = recording.definitions();
        let custom = options.custom_rules.map(|rules| CustomCategorizer::new(rules, definitions, names));
        let has_names = definitions.tensor_names.iter().any(|name| name.kind == TensorKind::Parameter);
        let names = has_names.then_some(names);
        let categorizer = Categorizer::new(definitions, has_names);
        let mut replay = Replay::new(trace_index, None);
        let compile_contexts = recording.compile_contexts();
        let mut tracked = Tracked { tracker: PhaseTracker::of(recording), names, custom, compile_contexts };
        let is_inference = tracked.tracker.is_inference();
        let diagnostics = Diagnostics::started(&RecordingStart { definitions, is_inference });
        let call_tree = Arc::new(CallTree::new(definitions));
        let new = |device: i16, source| DeviceAnalysis {
            step_peaks: options.step_peaks.iter().map(|step| (*step, Composition::default())).collect(),
            diagnostics: diagnostics.clone(),
            released: vec![ReleasedMemory::default(); options.released_after.len()],
            release_starts: vec![0; options.released_after.len()],
            calls: Calls::new(&call_tree),
            ..DeviceAnalysis::new(device, source, categorizer.clone(), definitions)
        };
        let mut devices: Vec<DeviceAnalysis> = replay.devices().iter().map(|d| new(d.device, d.source)).collect();
        devices.iter_mut().for_each(|device| device.table.dropped_steps(tracked.tracker.dropped_steps()));
        let mut ranges = options.range.map(|name| OpenRanges::new(name, definitions));
        let mut releases = ReleasePoints::new(options.released_after, definitions);
        let mut cuda_graphs = CudaGraphs::default();
        let (mut done, mut last_seq) = (0, 0);
        let mut memories = DeviceMemories::default();
        let lost = recording.stream(&mut |events| {
            for e in events {
                last_seq = e.seq;
                if e.source == Source::Label {
                    tracked.tracker.observe_label(e);
                    cuda_graphs.observe_range(e);
                    for device in &mut devices {
                        device.labels.observe(e);
                        device.diagnostics.range(e);
                    }
                    if let Some(ranges) = &mut ranges {
                        let was_open = ranges.is_open();
                        ranges.observe(e);
                        for (slot, device) in devices.iter_mut().enumerate() {
                            let usage = *replay.devices()[slot].allocator.usage();
                            match (was_open, ranges.is_open()) {
                                (false, true) => device.range_started(e, *tracked.tracker.now(), usage),
                                (true, false) => device.range_ended(&usage),
                                _ => {}
                            }
                        }
                    }
                    let passed = releases.observe_range(e);
                    if passed != Passed::default() {
                        let now = *tracked.tracker.now();
                        devices.iter_mut().for_each(|device| device.released(passed, (&replay, &memories), e, now));
                    }
                    observer.event_processed(&replay, e, tracked.tracker.now());
                    continue;
                }
                let passed = releases.observe(e);
                if passed != Passed::default() {
                    // The state before this event counts.
                    let (before, now) = (Event { seq: e.seq.saturating_sub(1), ..*e }, *tracked.tracker.now());
                    devices.iter_mut().for_each(|device| device.released(passed, (&replay, &memories), &before, now));
                }
                if let Some(pool) = cuda_graphs.observe(e)
                    && let Some(device) = devices.iter_mut().find(|device| device.device == e.device)
                {
                    device.categorizer.captured_into(pool);
                }
                replay.apply(e, |replay, slot, e, change| {
                    let Some(device) = devices.get_mut(slot) else { return };
                    device.observe(replay, slot, &mut tracked, observer, e, change);
                    if device.peak.seq == e.seq && matches!(change, Change::Alloc(_)) {
                        memories.allocated_peak(replay, e);
                    }
                });
                memories.observe(&replay, e);
                observer.event_processed(&replay, e, tracked.tracker.now());
            }
            done += events.len() as u64;
            progress(done);
        });
        let ended = trace_index.tick_range.map_or(0, |(_, last)| last);
        let calls_at_end = releases.finish();
        for (slot, device) in devices.iter_mut().enumerate() {
            device.labels.finish(ended);
            let last = Event { seq: last_seq, ticks: ended, action: Action::Snapshot, ..Event::EMPTY };
            device.released(calls_at_end, (&replay, &memories), &last, *tracked.tracker.now());
            device.finish(&replay.devices()[slot].allocator, &tracked, &last, observer);
            device.table.at_least(tracked.tracker.ended_steps());
        }
        let mut reached = Vec::new();
        for (slot, device) in devices.iter_mut().enumerate() {
            reached.extend(device.released.iter_mut().filter(|one| one.times > 0).map(|one| (slot, one)));
        }
        released::divide(recording, trace_index, reached);
        let last = Event { seq: last_seq, ticks: ended, ..Event::EMPTY };
        let device_memory = memories.finish(&replay, &last);
        let physical = replay.physical();
        Analysis {
            devices,
            device_memory,
            owners: physical.usage_by_owner().clone(),
            locations: physical
                .usage_by_owner()
                .keys()
                .map(|(location, _)| (*location, physical.total(*location)))
                .collect(),
            cache_growth: tracked.tracker.cache_growth().clone(),
            cuda_graphs,
            unmapped_segments: physical.unmapped_segments().clone(),
            failed_calls: physical.failed_calls(),
            unmatched_cuda_frees: physical.unmatched_frees(),
            lost,
        }
    }
}

impl Analysis {
    /// The issues of the process, in no particular order. `memory_limit`: the memory that the caching allocator can have on
    /// a device, in bytes; `None` if it is unknown.
    pub fn issues(
        &self,
        inputs: &IssueInputs<'_>,
        memory_limit: &dyn Fn(&DeviceAnalysis) -> Option<u64>,
    ) -> Vec<Issue> {
        let computing: Vec<i16> =
            self.devices.iter().filter(|one| one.diagnostics.computes()).map(|one| one.device).collect();
        let issues_of = |device: &DeviceAnalysis| {
            device.diagnostics.issues(&DeviceFacts {
                inputs,
                ordinal: device.device,
                source: device.source,
                peak: &device.peak,
                peaks: &device.peaks,
                table: &device.table,
                growth: &device.growth,
                ooms: &device.ooms,
                computes: device.diagnostics.computes(),
                computes_elsewhere: computing.iter().copied().find(|other| *other >= 0 && *other != device.device),
                memory_limit: memory_limit(device),
            })
        };
        self.devices.iter().flat_map(issues_of).collect()
    }
}

impl DeviceAnalysis {
    fn new(device: i16, source: EventSource, categorizer: Categorizer, definitions: &Definitions) -> DeviceAnalysis {
        DeviceAnalysis {
            device,
            source,
            peak: Composition::default(),
            end: Composition::default(),
            step_peaks: Vec::new(),
            range: None,
            released: Vec::new(),
            release_starts: Vec::new(),
            may_have_stayed: Vec::new(),
            in_range: false,
            peaks: Peak::default(),
            table: PhaseTable::default(),
            labels: LabelTable::new(definitions),
            calls: Calls::default(),
            growth: Growth::default(),
            step_inputs: StepInputs::default(),
            ooms: OomLog::default(),
            phase_rules: PhaseRuleUses::default(),
            category_rules: CategoryRuleUses::default(),
            custom_rules: Vec::new(),
            anomalies: memtrace_replay::Anomalies::default(),
            statistics: Statistics::default(),
            diagnostics: Diagnostics::default(),
            module_paths: ModulePaths::default(),
            last_ticks: 0,
            allocations: Vec::new(),
            pending_frees: Vec::new(),
            step_starts: StepStarts::default(),
            categorizer,
        }
    }

    #[inline]
    fn observe(
        &mut self,
        replay: &Replay,
        slot: usize,
        tracked: &mut Tracked<'_>,
        observer: &mut dyn BlockObserver,
        e: &Event,
        change: Change,
    ) {
        let allocator = &replay.devices()[slot].allocator;
        if self.source == EventSource::Torch {
            self.statistics.observe(allocator, e, &change);
        }
        match change {
            Change::Alloc(id) => {
                let classification = &tracked.tracker.observe(e);
                self.allocated(allocator, tracked, observer, &BlockEvent { e, id, classification });
            }
            Change::FreeRequested(id) => {
                if tracked.tracker.is_earlier(e) {
                    return;
                }
                let classification = &tracked.tracker.observe(e);
                self.freed(allocator.usage(), tracked, observer, &BlockEvent { e, id, classification });
            }
            Change::FreeCompleted(id, block) => self.diagnostics.free_completed(id, &block, e.ticks),
            Change::SegmentGained if e.action == Action::SegmentAlloc => {
                self.diagnostics.segment_requested(allocator, e, tracked.tracker.now());
            }
            Change::Oom => {
                let classification = tracked.tracker.observe(e);
                self.out_of_memory(replay, slot, tracked, e, &classification);
            }
            _ => {}
        }
    }

    #[inline]
    fn allocated(
        &mut self,
        allocator: &Allocator,
        tracked: &Tracked<'_>,
        observer: &mut dyn BlockObserver,
        event: &BlockEvent<'_>,
    ) {
        let BlockEvent { e, id, classification } = *event;
        let size = allocator.block(id).size;
        let Tracked { tracker, names, .. } = tracked;
        let now = *tracker.now();
        self.step_starts.observe(now.step, e.seq);
        self.step_inputs.allocated(&now);
        let is_earlier = tracker.is_earlier(e);
        let oom_count = self.ooms.count() as u32;
        let block = self.categorizer.allocated(tracker, e, allocator.block(id), classification, *names, oom_count);
        match self.allocations.get_mut(id.index()) {
            Some(old) => *old = block,
            None => self.allocations.resize(id.index() + 1, block),
        }
        let usage = allocator.usage();
        observer.allocated(self.device, &block, usage);
        self.last_ticks = e.ticks;
        self.diagnostics.allocated(&block, event, tracker.stacks().facts(e.stack), usage);
        if !is_earlier {
            self.phase_rules.add(classification, size);
        }
        for free in self.pending_frees.drain(..) {
            self.growth.lifetime_ended(&free.block, free.category, &free.position, free.phase);
        }
        let phase = classification.phase;
        if is_earlier {
            // The dropped events allocated it.
            self.table.starts_at(usage.allocated);
            self.labels.starts_at(usage.allocated);
        } else {
            self.table.alloc(now.step, phase, e.ticks, size, usage.allocated);
            self.table.micro_batches(tracker.micro_batches());
            self.labels.alloc(size, usage.allocated);
            let counted = if self.diagnostics.is_workspace(id) { 0 } else { block.size };
            self.calls.allocated(&block, e.thread, counted, id.index(), usage.allocated);
        }
        if usage.allocated > self.peak.usage.allocated {
            self.peak.restart(e, now, phase, *usage);
        }
        for (step, peak) in &mut self.step_peaks {
            if now.step == Some(*step) && usage.allocated > peak.usage.allocated {
                peak.restart(e, now, phase, *usage);
            }
        }
        if let Some(range) = self.range.as_mut().filter(|_| self.in_range)
            && usage.allocated > range.peak.usage.allocated
        {
            range.peak.restart(e, now, phase, *usage);
        }
    }

    /// A range of the requested name starts, and no other one is open. `e`: its event. `usage`: the totals then.
    fn range_started(&mut self, e: &Event, now: ProgramPosition, usage: Usage) {
        self.in_range = true;
        let first = self.range.is_none();
        let range = self.range.get_or_insert_with(|| RangeMemory { start: usage.allocated, ..RangeMemory::default() });
        if first || usage.allocated > range.peak.usage.allocated {
            range.peak.restart(e, now, now.phase, usage);
        }
    }

    /// No range of the requested name is open any more. `usage`: the totals then.
    fn range_ended(&mut self, usage: &Usage) {
        self.in_range = false;
        if let Some(range) = &mut self.range {
            range.end = usage.allocated;
        }
    }

    /// The program begins a range or a call after which memory should be released, or has ended it. `e`: the last event
    /// that counts.
    #[cold]
    fn released(
        &mut self,
        passed: Passed,
        (replay, memories): (&Replay, &DeviceMemories),
        e: &Event,
        now: ProgramPosition,
    ) {
        let Some(device) = replay.devices().iter().find(|device| device.device == self.device) else { return };
        let e = &Event { device: self.device, ..*e };
        let is_in = |bits: u32, at: usize| bits >> at & 1 != 0;
        let maybe = &mut self.may_have_stayed;
        maybe.retain(|(at, _)| !is_in(passed.goes_on, *at));
        for (at, (released, start)) in self.released.iter_mut().zip(&mut self.release_starts).enumerate() {
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

    #[inline]
    fn freed(
        &mut self,
        usage: &Usage,
        tracked: &Tracked<'_>,
        observer: &mut dyn BlockObserver,
        event: &BlockEvent<'_>,
    ) {
        let BlockEvent { e, id, classification: EventClassification { phase, .. } } = *event;
        let tracker = &tracked.tracker;
        self.categorizer.freed(tracker, e);
        let now = tracker.now();
        let Some(block) = self.allocations.get(id.index()).copied() else { return };
        // An error that unwinds the program frees blocks that would have stayed allocated.
        let is_truncated = self.ooms.unwinding(block.oom_count, now);
        let end = LifetimeEnd { now, is_truncated, free: Some(e) };
        let classification = self.categorizer.lifetime_ended(tracker, &block, &end);
        self.report_lifetime_end(&block, &classification, tracked, observer, Some(e));
        let category = classification.category;
        self.diagnostics.freed(&block, event, tracker.stacks().facts(e.stack), &end);
        let phase = *phase;
        self.step_inputs.classified(&block, category);
        self.labels.free(block.seq, block.size, usage.allocated);
        self.calls.freed(&block, id.index(), e.thread, e.stack);
        // After a pending free, later frees by user code count as frees of older blocks, until the next allocation.
        let older = block.position.step != now.step || !self.pending_frees.is_empty();
        let freed_in = (!is_truncated).then_some(phase);
        if event.classification.may_be_teardown(older) {
            self.table.free_maybe_teardown(phase, block.size, usage.allocated);
            self.pending_frees.push(PendingFree { block, category, position: *now, phase: freed_in });
        } else {
            self.table.free(now.step, phase, e.ticks, block.size, usage.allocated);
            self.growth.lifetime_ended(&block, category, now, freed_in);
        }
        self.add_to_peak(&block, category, tracked);
    }

    #[inline]
    fn add_to_peak(&mut self, block: &BlockAllocation, category: Category, tracked: &Tracked<'_>) {
        let step_peaks = self.step_peaks.iter_mut().map(|(_, peak)| peak);
        let maybe = self.may_have_stayed.iter_mut().map(|(_, released)| released);
        let released = self.released.iter_mut().chain(maybe).map(|released| &mut released.kept);
        let others = step_peaks.chain(self.range.as_mut().map(|range| &mut range.peak)).chain(released);
        for peak in std::iter::once(&mut self.peak).chain(others).filter(|peak| peak.includes(block.seq)) {
            Self::add(peak, &mut self.module_paths, block, category, tracked);
        }
    }

    /// Adds a block to a composition, and to the module that the block belongs to.
    fn add(
        to: &mut Composition,
        paths: &mut ModulePaths,
        block: &BlockAllocation,
        category: Category,
        tracked: &Tracked<'_>,
    ) {
        let custom = tracked.custom.as_ref().map(|custom| custom.category_of(block)).unwrap_or_default();
        let origin = Origin {
            stack: block.stack,
            context: block.context,
            phase: block.phase,
            category,
            custom,
            pool: block.private_pool(category),
            compile_context: tracked.compile_contexts.of(block.seq),
        };
        to.add(origin, block.size, block.seq);
        let call = tracked.tracker.stacks().contexts().module(block.event_context);
        let named = || tracked.names.filter(|_| block.proof.is_named())?.of_allocation(block.seq);
        let module = match named() {
            Some(named) => paths.number(named).map(ModuleKey::Path),
            None => (!call.is_none()).then_some(ModuleKey::Call(call)),
        };
        if let Some(module) = module {
            let checkpointed = tracked.tracker.stacks().facts(block.stack).in_checkpoint;
            to.add_to_module(module, category, block.size, block.seq, checkpointed);
        }
    }

    #[inline]
    fn report_lifetime_end(
        &mut self,
        block: &BlockAllocation,
        classification: &BlockClassification,
        tracked: &Tracked<'_>,
        observer: &mut dyn BlockObserver,
        free: Option<&Event>,
    ) {
        if let Some(custom) = &tracked.custom {
            let rules = custom.rules().rules().len();
            self.custom_rules.resize(rules + 1, Amount::default());
            self.custom_rules[custom.rule_of(block).unwrap_or(rules)].add(block.size);
        }
        let evidence = || self.categorizer.evidence(block, classification);
        observer.lifetime_ended(self.device, block, classification, evidence(), free);
        self.category_rules.add(classification, block.size, evidence);
    }

    fn out_of_memory(
        &mut self,
        replay: &Replay,
        slot: usize,
        tracked: &Tracked<'_>,
        e: &Event,
        classification: &EventClassification,
    ) {
        let now = tracked.tracker.now();
        let allocator = &replay.devices()[slot].allocator;
        let physical = replay.physical();
        self.diagnostics.segment_requested(allocator, e, now);
        self.categorizer.out_of_memory();
        let in_use = if self.ooms.needs_details() {
            let end = LifetimeEnd { now, is_truncated: true, free: None };
            let allocated = allocator.allocated().filter_map(|(id, _)| self.allocations.get(id.index()));
            self.categorizer.examine_allocated(&tracked.tracker, allocated, &end);
            self.diagnostics.out_of_memory(allocator, &self.allocations, e, classification, now);
            self.blocks_in_use(allocator, tracked, e, classification.phase)
        } else {
            Composition::default()
        };
        self.ooms.add(
            Oom {
                seq: e.seq,
                ticks: e.ticks,
                requested: e.size,
                // The fallback event source does not report free device memory.
                device_free: (e.source == memtrace_trace::event::Source::Torch).then_some(e.addr),
                requested_at: (e.stack, e.context),
                phase: classification.phase,
                rule: classification.rule,
                position: *now,
                step_starts: self.step_starts,
                in_use,
                reserved: Reserved::of(allocator, MAX_BLOCKERS),
                outside_pytorch: physical.owners_outside_allocator(self.device),
            },
            now,
        );
    }

    /// The blocks that are in use now. `e`: the latest event, in `phase`.
    fn blocks_in_use(&mut self, allocator: &Allocator, tracked: &Tracked<'_>, e: &Event, phase: Phase) -> Composition {
        let tracker = &tracked.tracker;
        let now = tracker.now();
        let end = LifetimeEnd { now, is_truncated: true, free: None };
        let mut in_use = Composition::default();
        in_use.restart(e, *now, phase, *allocator.usage());
        for (id, _) in allocator.allocated().filter(|(_, b)| b.state == memtrace_replay::BlockState::Allocated) {
            if let Some(block) = self.allocations.get(id.index()) {
                let category = self.categorizer.classify(tracker, block, &end).category;
                Self::add(&mut in_use, &mut self.module_paths, block, category, tracked);
            }
        }
        in_use
    }

    /// `last`: the time and number of the recording's last event.
    fn finish(&mut self, allocator: &Allocator, tracked: &Tracked<'_>, last: &Event, observer: &mut dyn BlockObserver) {
        let tracker = &tracked.tracker;
        let now = tracker.now();
        let end = LifetimeEnd { now, is_truncated: true, free: None };
        let allocated = allocator.allocated().filter_map(|(id, _)| self.allocations.get(id.index()));
        self.categorizer.examine_allocated(tracker, allocated, &end);
        if self.in_range {
            self.range_ended(allocator.usage());
        }
        self.peaks = *allocator.peak();
        self.anomalies = *allocator.anomalies();
        self.table.finish();
        self.calls.finish();
        self.ooms.finish(now);
        self.end = self.blocks_in_use(allocator, tracked, last, now.phase);
        self.diagnostics.finish(allocator, &self.allocations, now, self.last_ticks);
        for (id, allocated) in allocator.allocated() {
            let Some(block) = self.allocations.get(id.index()).copied() else { continue };
            // A block that waits for a stream was already freed by the program.
            if allocated.state != memtrace_replay::BlockState::Allocated {
                continue;
            }
            let classification = self.categorizer.classify(tracker, &block, &end);
            self.report_lifetime_end(&block, &classification, tracked, observer, None);
            let category = classification.category;
            self.growth.lifetime_ended(&block, category, now, None);
            self.step_inputs.classified(&block, category);
            self.add_to_peak(&block, category, tracked);
        }
        for free in std::mem::take(&mut self.pending_frees) {
            self.growth.lifetime_ended(&free.block, free.category, &free.position, None);
        }
        self.allocations = Vec::new();
    }
}
