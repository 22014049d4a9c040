//! Analyzes one process in a single streaming pass: replay, phases, and every conclusion that depends on them.

use std::collections::BTreeMap;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::FrameId;

use super::category::{Birth, Categorizer, Category, CategoryReasons, End, Judged, Proof};
use super::composition::{Composition, Origin};
use super::finding::Finding;
use super::fragmentation::Reserved;
use super::growth::Growth;
use super::illness::Symptoms;
use super::labels::LabelTable;
use super::modules::{Belongs, Paths};
use super::oom::{Oom, OomLog};
use super::phase::{Moment, Phase, PhaseTracker, Verdict};
use super::phase_table::PhaseTable;
use super::reasons::Reasons;
use super::statistics::Statistics;
use memtrace_input::{Lane, LostEvents, Recording, Survey};
use memtrace_replay::{Allocator, BlockId, Change, Names, Owner, OwnerUse, Peak, Place, Replay, Usage};

/// The maximum number of origins to report that hold segments at an out-of-memory error.
const PINS: usize = 10;

/// The results for one device.
#[derive(Clone, Debug)]
pub struct DeviceStory {
    /// The device ordinal; -1 for the CPU.
    pub device: i16,
    /// The event source that describes this device.
    pub lane: Lane,
    /// The blocks that were allocated at the peak of allocated bytes.
    pub peak: Composition,
    /// The blocks that were allocated at the end.
    pub end: Composition,
    /// The blocks that were allocated at the peaks of the requested steps. Empty for a step that never came.
    pub watched: Vec<(u32, Composition)>,
    /// The highest totals, each at its own point in time.
    pub peaks: Peak,
    /// What each phase did.
    pub table: PhaseTable,
    /// What happened in the ranges that the program named.
    pub labels: LabelTable,
    /// What grew after the first step.
    pub growth: Growth,
    /// The out-of-memory errors.
    pub ooms: OomLog,
    /// Which rules decided phases.
    pub reasons: Reasons,
    /// Which rules decided categories.
    pub category_reasons: CategoryReasons,
    /// Events that contradict the replayed state.
    pub anomalies: memtrace_replay::Anomalies,
    /// The values that `torch.cuda.memory_stats` would return at the end.
    pub statistics: Statistics,
    /// What the block lifetimes show about issues.
    pub symptoms: Symptoms,
    /// The paths of the modules that the compositions here refer to.
    pub paths: Paths,
    last_ticks: u64,
    births: Vec<Birth>,
    loose: Vec<LooseEnd>,
    categorizer: Categorizer,
}

/// The program's position and the tensor names.
struct Course<'a> {
    tracker: PhaseTracker,
    names: Option<&'a Names>,
}

/// Observes every block of a recording. A [`Story`] itself keeps only the blocks that are allocated.
pub trait Lives {
    /// A block was allocated; `usage` includes it.
    fn began(&mut self, device: i16, birth: &Birth, usage: &Usage);
    /// A block was freed by `free`, or, with `None`, was still allocated at the end. `evidence`: the frame that a frame
    /// rule matched, else `NONE`.
    fn ended(&mut self, device: i16, birth: &Birth, judged: &Judged, evidence: FrameId, free: Option<&Event>);
    /// An event of any kind has passed. `replay` is the state after it, `now` the program's position.
    #[inline]
    fn passed(&mut self, _replay: &Replay, _e: &Event, _now: &Moment) {}
}

impl Lives for () {
    #[inline]
    fn began(&mut self, _: i16, _: &Birth, _: &Usage) {}
    #[inline]
    fn ended(&mut self, _: i16, _: &Birth, _: &Judged, _: FrameId, _: Option<&Event>) {}
}

/// A block that was freed by what can be the program's end ([`Verdict::is_loose_free`]).
#[derive(Clone, Copy, Debug)]
struct LooseEnd {
    birth: Birth,
    category: Category,
    at: Moment,
    phase: Option<Phase>,
}

/// The results for one process.
#[derive(Clone, Debug, Default)]
pub struct Story {
    /// The devices, by ordinal.
    pub devices: Vec<DeviceStory>,
    /// What each owner held of each device's memory and of page-locked host memory.
    pub owners: BTreeMap<(Place, Owner), OwnerUse>,
    /// The sum over all owners, by place.
    pub places: BTreeMap<Place, OwnerUse>,
    /// The issues found, in no particular order.
    pub findings: Vec<Finding>,
    /// CUDA calls that failed.
    pub failed_calls: u64,
    /// CUDA frees of memory whose allocation was not recorded.
    pub unmatched_cuda_frees: u64,
    /// Events that could not be decoded.
    pub lost: LostEvents,
}

impl Story {
    /// Streams a recording once. `progress` receives the number of events read so far.
    pub fn of(recording: &dyn Recording, survey: &Survey, progress: &mut dyn FnMut(u64)) -> Story {
        Story::with(recording, survey, &Names::of(recording), &mut (), progress)
    }

    /// Takes `names` that the caller has already read. `lives` observes every block, `progress` the number of events
    /// read so far.
    pub fn with(
        recording: &dyn Recording,
        survey: &Survey,
        names: &Names,
        lives: &mut impl Lives,
        progress: &mut dyn FnMut(u64),
    ) -> Story {
        Story::watching(recording, survey, names, &[], lives, progress)
    }

    /// Also records, for each step in `steps`, the blocks that were allocated at the step's peak.
    pub fn watching(
        recording: &dyn Recording,
        survey: &Survey,
        names: &Names,
        steps: &[u32],
        lives: &mut impl Lives,
        progress: &mut dyn FnMut(u64),
    ) -> Story {
        let definitions = recording.definitions();
        let has_names = definitions.tensor_names.iter().any(|name| name.kind == TensorKind::Parameter);
        let names = has_names.then_some(names);
        let categorizer = Categorizer::new(definitions, has_names);
        let mut replay = Replay::new(survey, None);
        let mut course = Course { tracker: PhaseTracker::of(recording), names };
        let new = |device: i16, lane| DeviceStory {
            watched: steps.iter().map(|step| (*step, Composition::default())).collect(),
            ..DeviceStory::new(device, lane, categorizer.clone(), definitions)
        };
        let mut devices: Vec<DeviceStory> = replay.devices().iter().map(|d| new(d.device, d.lane)).collect();
        let (mut done, mut last_seq) = (0, 0);
        let lost = recording.stream(&mut |events| {
            for e in events {
                last_seq = e.seq;
                if e.source == Source::Label {
                    course.tracker.observe_label(e);
                    devices.iter_mut().for_each(|device| device.labels.observe(e));
                    lives.passed(&replay, e, course.tracker.now());
                    continue;
                }
                replay.apply(e, |replay, slot, e, change| {
                    let Some(device) = devices.get_mut(slot) else { return };
                    device.observe(replay, slot, &mut course, lives, e, change);
                });
                lives.passed(&replay, e, course.tracker.now());
            }
            done += events.len() as u64;
            progress(done);
        });
        let ended = survey.ticks.map_or(0, |(_, last)| last);
        for (slot, device) in devices.iter_mut().enumerate() {
            device.labels.finish(ended);
            let last = Event { seq: last_seq, ticks: ended, action: Action::Snapshot, ..Event::EMPTY };
            device.finish(&replay.devices()[slot].allocator, &course, &last, lives);
            device.table.at_least(course.tracker.steps_told());
        }
        let physical = replay.physical();
        Story {
            devices,
            owners: physical.uses().clone(),
            places: physical.uses().keys().map(|(place, _)| (*place, physical.total(*place))).collect(),
            findings: Vec::new(),
            failed_calls: physical.failed_calls(),
            unmatched_cuda_frees: physical.unmatched_frees(),
            lost,
        }
    }
}

impl DeviceStory {
    fn new(device: i16, lane: Lane, categorizer: Categorizer, definitions: &Definitions) -> DeviceStory {
        DeviceStory {
            device,
            lane,
            peak: Composition::default(),
            end: Composition::default(),
            watched: Vec::new(),
            peaks: Peak::default(),
            table: PhaseTable::default(),
            labels: LabelTable::new(definitions),
            growth: Growth::default(),
            ooms: OomLog::default(),
            reasons: Reasons::default(),
            category_reasons: CategoryReasons::default(),
            anomalies: memtrace_replay::Anomalies::default(),
            statistics: Statistics::default(),
            symptoms: Symptoms::default(),
            paths: Paths::default(),
            last_ticks: 0,
            births: Vec::new(),
            loose: Vec::new(),
            categorizer,
        }
    }

    #[inline]
    fn observe(
        &mut self,
        replay: &Replay,
        slot: usize,
        course: &mut Course<'_>,
        lives: &mut impl Lives,
        e: &Event,
        change: Change,
    ) {
        let allocator = &replay.devices()[slot].allocator;
        if self.lane == Lane::Torch {
            self.statistics.observe(allocator, e, &change);
        }
        match change {
            Change::Alloc(id) => {
                let verdict = course.tracker.observe(e);
                self.born(allocator, course, lives, e, id, &verdict);
            }
            Change::FreeRequested(id) => {
                let verdict = course.tracker.observe(e);
                self.freed(allocator.usage(), course, lives, e, id, &verdict);
            }
            Change::FreeCompleted(id, block) => self.symptoms.completed(id, &block, e.ticks),
            Change::SegmentGained if e.action == Action::SegmentAlloc => {
                self.symptoms.wanted_more(allocator, e, course.tracker.now());
            }
            Change::Oom => {
                let verdict = course.tracker.observe(e);
                self.ran_out(replay, slot, course, e, &verdict);
            }
            _ => {}
        }
    }

    #[inline]
    fn born(
        &mut self,
        allocator: &Allocator,
        course: &Course<'_>,
        lives: &mut impl Lives,
        e: &Event,
        id: BlockId,
        verdict: &Verdict,
    ) {
        let block = allocator.block(id);
        let Course { tracker, names } = course;
        let now = *tracker.now();
        let name = names.and_then(|names| names.of_alloc(e.seq));
        let birth = self.categorizer.born(tracker, e, block, verdict, name, self.ooms.count() as u32);
        match self.births.get_mut(id.index()) {
            Some(place) => *place = birth,
            None => self.births.resize(id.index() + 1, birth),
        }
        let usage = allocator.usage();
        lives.began(self.device, &birth, usage);
        self.last_ticks = e.ticks;
        self.symptoms.born(&birth, e, id, tracker.stacks().facts(e.stack), verdict, usage);
        self.reasons.add(verdict, block.size);
        for end in self.loose.drain(..) {
            self.growth.ended(&end.birth, end.category, &end.at, end.phase);
        }
        self.table.alloc(now.step, verdict.phase, e.ticks, block.size, usage.allocated);
        self.labels.alloc(block.size, usage.allocated);
        if usage.allocated > self.peak.usage.allocated {
            self.peak.restart(e.seq, e.ticks, now, verdict.phase, (e.stack, e.context), *usage);
        }
        for (step, peak) in &mut self.watched {
            if now.step == Some(*step) && usage.allocated > peak.usage.allocated {
                peak.restart(e.seq, e.ticks, now, verdict.phase, (e.stack, e.context), *usage);
            }
        }
    }

    #[inline]
    fn freed(
        &mut self,
        usage: &Usage,
        course: &Course<'_>,
        lives: &mut impl Lives,
        e: &Event,
        id: BlockId,
        verdict: &Verdict,
    ) {
        let tracker = &course.tracker;
        self.categorizer.freed(tracker, e);
        let now = tracker.now();
        let Some(birth) = self.births.get(id.index()).copied() else { return };
        // An error that unwinds the program frees blocks that would have stayed allocated.
        let cut = self.ooms.unwinding(birth.ooms, now);
        let end = End { now, cut, free: Some(e) };
        let judged = self.categorizer.ended(tracker, &birth, &end);
        self.settle(&birth, &judged, lives, Some(e));
        let category = judged.category;
        self.symptoms.freed(&birth, id, tracker.stacks().facts(e.stack), verdict, &end);
        let phase = verdict.phase;
        self.labels.free(birth.seq, birth.size, usage.allocated);
        // After a loose free, later frees by user code count as frees of older blocks, until the next allocation.
        let older = birth.at.step != now.step || !self.loose.is_empty();
        if verdict.is_loose_free(older) {
            self.table.free_loose(phase, birth.size, usage.allocated);
            self.loose.push(LooseEnd { birth, category, at: *now, phase: (!cut).then_some(phase) });
        } else {
            self.table.free(now.step, phase, e.ticks, birth.size, usage.allocated);
            self.growth.ended(&birth, category, now, (!cut).then_some(phase));
        }
        self.add_to_peak(&birth, category, course);
    }

    #[inline]
    fn add_to_peak(&mut self, birth: &Birth, category: Category, course: &Course<'_>) {
        let watched = self.watched.iter_mut().map(|(_, peak)| peak);
        for peak in std::iter::once(&mut self.peak).chain(watched).filter(|peak| peak.includes(birth.seq)) {
            Self::add(peak, &mut self.paths, birth, category, course);
        }
    }

    /// Adds a block to a composition, and to the module that the block belongs to.
    fn add(to: &mut Composition, paths: &mut Paths, birth: &Birth, category: Category, course: &Course<'_>) {
        to.add(origin(birth, category), birth.size, birth.seq);
        let module = course.tracker.stacks().contexts().module(birth.within);
        let named =
            || course.names.filter(|_| matches!(birth.proof, Proof::Named(_) | Proof::NamedCache))?.of_alloc(birth.seq);
        let belongs = match named() {
            Some(named) => paths.number(named).map(Belongs::Path),
            None => (!module.is_none()).then_some(Belongs::Call(module)),
        };
        if let Some(belongs) = belongs {
            let checkpointed = course.tracker.stacks().facts(birth.stack).in_checkpoint;
            to.add_to_module(belongs, category, birth.size, birth.seq, checkpointed);
        }
    }

    #[inline]
    fn settle(&mut self, birth: &Birth, judged: &Judged, lives: &mut impl Lives, free: Option<&Event>) {
        let evidence = || self.categorizer.evidence(birth, judged);
        lives.ended(self.device, birth, judged, evidence(), free);
        self.category_reasons.add(judged, birth.size, evidence);
    }

    fn ran_out(&mut self, replay: &Replay, slot: usize, course: &Course<'_>, e: &Event, verdict: &Verdict) {
        let now = course.tracker.now();
        let allocator = &replay.devices()[slot].allocator;
        let physical = replay.physical();
        self.symptoms.wanted_more(allocator, e, now);
        let there = if self.ooms.wants_details() {
            self.alive(allocator, course, e, verdict.phase)
        } else {
            Composition::default()
        };
        self.ooms.add(
            Oom {
                seq: e.seq,
                ticks: e.ticks,
                wanted: e.size,
                // The fallback event source does not report free device memory.
                device_free: (e.source == memtrace_trace::event::Source::Torch).then_some(e.addr),
                by: (e.stack, e.context),
                phase: verdict.phase,
                rule: verdict.rule,
                at: *now,
                there,
                reserved: Reserved::of(allocator, PINS),
                outside: physical.outside_now(self.device),
            },
            now,
        );
    }

    /// The blocks that are allocated now.
    fn alive(&mut self, allocator: &Allocator, course: &Course<'_>, e: &Event, phase: Phase) -> Composition {
        let tracker = &course.tracker;
        let now = tracker.now();
        let end = End { now, cut: true, free: None };
        let mut alive = Composition::default();
        alive.restart(e.seq, e.ticks, *now, phase, (e.stack, e.context), *allocator.usage());
        for (id, _) in allocator.allocated().filter(|(_, b)| b.state == memtrace_replay::BlockState::Allocated) {
            if let Some(birth) = self.births.get(id.index()) {
                let category = self.categorizer.judge(tracker, birth, &end).category;
                Self::add(&mut alive, &mut self.paths, birth, category, course);
            }
        }
        alive
    }

    /// `last`: the time and number of the recording's last event.
    fn finish(&mut self, allocator: &Allocator, course: &Course<'_>, last: &Event, lives: &mut impl Lives) {
        let tracker = &course.tracker;
        let now = tracker.now();
        let end = End { now, cut: true, free: None };
        let there = allocator.allocated().filter_map(|(id, _)| self.births.get(id.index()));
        self.categorizer.ending(tracker, there, &end);
        self.peaks = *allocator.peak();
        self.anomalies = *allocator.anomalies();
        self.table.finish();
        self.ooms.finish(now);
        self.end = self.alive(allocator, course, last, now.phase);
        let alive = allocator.allocated().filter(|(_, b)| b.state == memtrace_replay::BlockState::Allocated);
        let births = &self.births;
        self.symptoms.finish(
            allocator,
            alive.filter_map(|(id, _)| Some((id, births.get(id.index())?))),
            now,
            self.last_ticks,
        );
        for (id, block) in allocator.allocated() {
            let Some(birth) = self.births.get(id.index()).copied() else { continue };
            // A block that waits for a stream was already freed by the program.
            if block.state != memtrace_replay::BlockState::Allocated {
                continue;
            }
            let judged = self.categorizer.judge(tracker, &birth, &end);
            self.settle(&birth, &judged, lives, None);
            let category = judged.category;
            self.growth.ended(&birth, category, now, None);
            self.add_to_peak(&birth, category, course);
        }
        for end in std::mem::take(&mut self.loose) {
            self.growth.ended(&end.birth, end.category, &end.at, None);
        }
        self.births = Vec::new();
    }
}

fn origin(birth: &Birth, category: Category) -> Origin {
    Origin { stack: birth.stack, context: birth.context, phase: birth.phase, category }
}
