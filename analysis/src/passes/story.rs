//! The whole analysis of one process in one streaming pass: replay, phases, and every conclusion that rests on them.

use std::collections::{BTreeMap, HashSet};

use memtrace_trace::event::{Action, Event};
use memtrace_trace::ids::StackId;

use super::category::{Birth, Category, Proof, categorize};
use super::composition::{Composition, Origin};
use super::finding::Finding;
use super::fragmentation::Reserved;
use super::growth::Growth;
use super::oom::{Oom, OomLog};
use super::phase::{Moment, Phase, PhaseTracker, Verdict};
use super::phase_table::PhaseTable;
use super::reasons::Reasons;
use super::stacks::StackTable;
use crate::model::{
    AddressHashing, Allocator, BlockId, Change, Lane, LostEvents, Owner, OwnerUse, Peak, Place, Recording, Replay,
    Survey, Usage,
};
use crate::rules::{Meaning, is_workspace_size};

/// Origins named that pin memory at an error.
const PINS: usize = 10;

/// What is concluded about one device.
#[derive(Clone, Debug)]
pub struct DeviceStory {
    /// The ordinal, -1 for the CPU.
    pub device: i16,
    /// Whose events tell about it.
    pub lane: Lane,
    /// What was alive at the peak of allocated bytes.
    pub peak: Composition,
    /// What was alive at the end.
    pub end: Composition,
    /// The highest totals, each at its own moment.
    pub peaks: Peak,
    /// What each phase did.
    pub table: PhaseTable,
    /// What grew.
    pub growth: Growth,
    /// Out-of-memory errors.
    pub ooms: OomLog,
    /// Which rules decided.
    pub reasons: Reasons,
    /// What did not fit together.
    pub anomalies: crate::model::Anomalies,
    births: Vec<Birth>,
    loose: Vec<LooseEnd>,
    parameter_sizes: HashSet<u64, AddressHashing>,
}

/// A block that was freed by what may be the program's end; see [`Verdict::is_loose_free`].
#[derive(Clone, Copy, Debug)]
struct LooseEnd {
    birth: Birth,
    category: Category,
    at: Moment,
    phase: Option<Phase>,
}

/// What is concluded about one process.
#[derive(Clone, Debug, Default)]
pub struct Story {
    /// Its devices, in order of ordinal.
    pub devices: Vec<DeviceStory>,
    /// What each owner held of each device's memory and of page-locked host memory.
    pub owners: BTreeMap<(Place, Owner), OwnerUse>,
    /// The same, altogether.
    pub places: BTreeMap<Place, OwnerUse>,
    /// What is wrong, in no order.
    pub findings: Vec<Finding>,
    /// CUDA calls that failed.
    pub failed_calls: u64,
    /// CUDA frees of memory whose allocation was not recorded.
    pub unmatched_cuda_frees: u64,
    /// What could not be decoded.
    pub lost: LostEvents,
}

impl Story {
    /// Streams a recording once. `progress` hears how many events have been read.
    pub fn of(recording: &dyn Recording, survey: &Survey, progress: &mut dyn FnMut(u64)) -> Story {
        let definitions = recording.definitions();
        let mut replay = Replay::new(survey, None);
        let mut tracker = PhaseTracker::new(StackTable::new(definitions));
        let mut devices: Vec<DeviceStory> =
            replay.devices().iter().map(|d| DeviceStory::new(d.device, d.lane)).collect();
        let accumulates: Vec<bool> = definitions.contexts.iter().map(|c| &*c.node == "AccumulateGrad").collect();
        let mut done = 0;
        let lost = recording.stream(&mut |events| {
            for e in events {
                replay.apply(e, |replay, slot, e, change| {
                    let Some(device) = devices.get_mut(slot) else { return };
                    device.observe(replay, slot, &mut tracker, &accumulates, e, change);
                });
            }
            done += events.len() as u64;
            progress(done);
        });
        for (slot, device) in devices.iter_mut().enumerate() {
            device.finish(&replay.devices()[slot].allocator, tracker.now());
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
    fn new(device: i16, lane: Lane) -> DeviceStory {
        DeviceStory {
            device,
            lane,
            peak: Composition::default(),
            end: Composition::default(),
            peaks: Peak::default(),
            table: PhaseTable::default(),
            growth: Growth::default(),
            ooms: OomLog::default(),
            reasons: Reasons::default(),
            anomalies: crate::model::Anomalies::default(),
            births: Vec::new(),
            loose: Vec::new(),
            parameter_sizes: HashSet::default(),
        }
    }

    #[inline]
    fn observe(
        &mut self,
        replay: &Replay,
        slot: usize,
        tracker: &mut PhaseTracker,
        accumulates: &[bool],
        e: &Event,
        change: Change,
    ) {
        let allocator = &replay.devices()[slot].allocator;
        match change {
            Change::Alloc(id) => {
                let verdict = tracker.observe(e);
                self.born(allocator, tracker, accumulates, e, id, &verdict);
            }
            Change::FreeRequested(id) => {
                let verdict = tracker.observe(e);
                self.freed(allocator.usage(), tracker.now(), e, id, &verdict);
            }
            Change::Oom => {
                let verdict = tracker.observe(e);
                self.ran_out(replay, slot, tracker.now(), e, &verdict);
            }
            _ => {}
        }
    }

    #[inline]
    fn born(
        &mut self,
        allocator: &Allocator,
        tracker: &PhaseTracker,
        accumulates: &[bool],
        e: &Event,
        id: BlockId,
        verdict: &Verdict,
    ) {
        let block = allocator.block(id);
        let now = *tracker.now();
        let proof = match verdict.meaning() {
            Some(Meaning::Load) => {
                self.parameter_sizes.insert(block.requested);
                Proof::Model
            }
            Some(Meaning::OptimizerState) => Proof::State,
            _ => self.proof_by_size(
                verdict.phase,
                block.requested,
                accumulates.get(e.context.index()).is_some_and(|a| *a),
            ),
        };
        let birth = Birth {
            seq: e.seq,
            size: block.size,
            requested: block.requested,
            stack: e.stack,
            context: tracker.stacks().contexts().node(e.context),
            at: now,
            phase: verdict.phase,
            ooms: self.ooms.count() as u32,
            proof,
        };
        match self.births.get_mut(id.index()) {
            Some(place) => *place = birth,
            None => self.births.resize(id.index() + 1, birth),
        }
        let usage = allocator.usage();
        self.reasons.add(verdict, block.size);
        for end in self.loose.drain(..) {
            self.growth.ended(&end.birth, end.category, &end.at, end.phase);
        }
        self.table.alloc(now.step, verdict.phase, e.ticks, block.size, usage.allocated);
        if usage.allocated > self.peak.usage.allocated {
            self.peak.restart(e.seq, e.ticks, now, verdict.phase, (e.stack, e.context), *usage);
        }
    }

    fn proof_by_size(&self, phase: Phase, requested: u64, accumulates: bool) -> Proof {
        let computes = matches!(phase, Phase::Forward | Phase::Backward | Phase::Eval | Phase::Recompute);
        if phase == Phase::Backward && accumulates {
            Proof::AccumulatesGradient
        } else if phase == Phase::Backward && self.parameter_sizes.contains(&requested) {
            Proof::ParameterSized
        } else if computes && is_workspace_size(requested) {
            Proof::WorkspaceSized
        } else {
            Proof::None
        }
    }

    #[inline]
    fn freed(&mut self, usage: &Usage, now: &Moment, e: &Event, id: BlockId, verdict: &Verdict) {
        let Some(birth) = self.births.get(id.index()).copied() else { return };
        // An error that unwinds the program frees what would have lived on.
        let cut = self.ooms.unwinding(birth.ooms, now);
        let category = categorize(&birth, now, cut);
        let phase = verdict.phase;
        // What follows an older block's free in the same way goes the same way.
        let older = birth.at.step != now.step || !self.loose.is_empty();
        if verdict.is_loose_free(older) {
            self.table.free_loose(phase, birth.size, usage.allocated);
            self.loose.push(LooseEnd { birth, category, at: *now, phase: (!cut).then_some(phase) });
        } else {
            self.table.free(now.step, phase, e.ticks, birth.size, usage.allocated);
            self.growth.ended(&birth, category, now, (!cut).then_some(phase));
        }
        if self.peak.includes(birth.seq) {
            self.peak.add(origin(&birth, category), birth.size, birth.seq);
        }
    }

    fn ran_out(&mut self, replay: &Replay, slot: usize, now: &Moment, e: &Event, verdict: &Verdict) {
        let allocator = &replay.devices()[slot].allocator;
        let physical = replay.physical();
        let there = if self.ooms.wants_details() {
            self.alive(allocator, now, e, verdict.phase)
        } else {
            Composition::default()
        };
        self.ooms.add(
            Oom {
                seq: e.seq,
                ticks: e.ticks,
                wanted: e.size,
                // The fallback source does not tell what was free.
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

    /// What is alive now.
    fn alive(&self, allocator: &Allocator, now: &Moment, e: &Event, phase: Phase) -> Composition {
        let mut alive = Composition::default();
        alive.restart(e.seq, e.ticks, *now, phase, (e.stack, e.context), *allocator.usage());
        for (id, _) in allocator.allocated().filter(|(_, b)| b.state == crate::model::BlockState::Allocated) {
            if let Some(birth) = self.births.get(id.index()) {
                alive.add(origin(birth, categorize(birth, now, true)), birth.size, birth.seq);
            }
        }
        alive
    }

    fn finish(&mut self, allocator: &Allocator, now: &Moment) {
        self.peaks = *allocator.peak();
        self.anomalies = *allocator.anomalies();
        self.table.finish();
        self.ooms.finish(now);
        let last = Event { action: Action::Snapshot, stack: StackId::NONE, ..Event::EMPTY };
        self.end = self.alive(allocator, now, &last, now.phase);
        for (id, block) in allocator.allocated() {
            let Some(birth) = self.births.get(id.index()).copied() else { continue };
            // A block that waits for a stream was given back already.
            if block.state != crate::model::BlockState::Allocated {
                continue;
            }
            let category = categorize(&birth, now, true);
            self.growth.ended(&birth, category, now, None);
            if self.peak.includes(birth.seq) {
                self.peak.add(origin(&birth, category), birth.size, birth.seq);
            }
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
