//! Assigns a phase and a step to each event.
//!
//! Most events prove their phase on their own: an autograd node is running (backward), or the stack has a frame that a
//! rule matches. Such a classification depends only on the stack, the node and the flags. The remaining events come
//! from user code that no rule matches. Their position in the program decides. Before the first forward pass they are
//! loading. Between forward and backward they belong to the forward pass (the loss). Before a step's forward pass they
//! load data.
//!
//! An evaluation is the outermost call of a module in which autograd does not record. Generation and rollouts are
//! evaluations to the position in the program; only their name differs ([`super::forward_only`]). Code without gradients inside a
//! forward pass with gradients (a rotary embedding) belongs to that forward pass ([`super::model_calls`]). Some code does
//! not move the position: clearing gradients, an evaluation between forward and backward (a teacher), and an optimizer
//! inside a backward pass.
//!
//! A step is one iteration of the loop that the program's optimizers drive. PyTorch marks calls of optimizers from 2.1
//! on, with profiler ranges. These ranges give the exact end of each step, even where the optimizer allocates nothing
//! ([`super::steps`]). What follows the last optimizer of a step still belongs to it: clearing gradients, metrics, an
//! evaluation. The next step begins with the first block of a forward pass with gradients, of a backward pass, or of data
//! loading with gradients enabled. An evaluation begins no step, nor does anything after the last forward or backward pass
//! of the training.
//!
//! Without such ranges, the end of a step is derived from the best evidence in the recording:
//!
//! 1. A step ends when an optimizer's step has run and the program goes on to something else.
//! 2. Without any optimizer frames, a step ends when gradients are cleared after a backward pass.
//! 3. Without cleared gradients, each backward pass ends a step.
//! 4. Without a backward pass, each new call of the model begins a step.
//!
//! Some optimizers (SGD with momentum) allocate in their first step only. Such an optimizer is assumed to step after as
//! many backward passes as the first time.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{FrameId, StackId, ThreadId};
use memtrace_trace::rotation::{Circumstances, Progress, Rotation};

use super::model_calls::{ModelCalls, OpenCall, SearchPosition};
use super::stacks::{StackFacts, StackTable};
use super::steps::{FirstPass, LabelRules, StepEnds, first_pass};
use crate::rules::{ForwardOnlyUse, LabelRule, Meaning, PhaseRuleId};
use memtrace_input::Recording;

/// What the program is doing.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Debug,
    Default,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Building, moving and filling models: everything before the first forward pass.
    Load,
    /// Bringing a batch to the device.
    Data,
    /// The forward pass, including the loss.
    Forward,
    /// The autograd engine.
    Backward,
    /// Forward computations that activation checkpointing repeats during backward.
    Recompute,
    /// The optimizer, including clipping and clearing gradients.
    Optimizer,
    /// Forward passes that no backward pass follows and that are neither of the next two: evaluation, teachers.
    Eval,
    /// Generation: a model that computes one token after the other.
    Generate,
    /// The collection of experience for reinforcement learning, between parts of the training.
    Rollout,
    /// Anything else.
    #[default]
    Other,
}

impl Phase {
    /// All phases, in the order in which reports list them.
    pub const ALL: [Phase; 10] = [
        Phase::Load,
        Phase::Data,
        Phase::Forward,
        Phase::Backward,
        Phase::Recompute,
        Phase::Optimizer,
        Phase::Eval,
        Phase::Generate,
        Phase::Rollout,
        Phase::Other,
    ];

    /// The name in files and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Load => "load",
            Phase::Data => "data",
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Recompute => "recompute",
            Phase::Optimizer => "optimizer",
            Phase::Eval => "eval",
            Phase::Generate => "generate",
            Phase::Rollout => "rollout",
            Phase::Other => "other",
        }
    }

    /// Whether the phase runs models, gradients or optimizers.
    pub const fn computes(self) -> bool {
        self.is_forward_only() || matches!(self, Phase::Forward | Phase::Backward | Phase::Optimizer | Phase::Recompute)
    }

    /// The phase with this name.
    pub fn named(name: &str) -> Option<Phase> {
        Phase::ALL.into_iter().find(|phase| phase.name() == name)
    }

    /// Whether models compute what no backward pass follows: an evaluation, generation or a rollout.
    #[inline]
    pub const fn is_forward_only(self) -> bool {
        matches!(self, Phase::Eval | Phase::Generate | Phase::Rollout)
    }
}

/// The phase of an event and the evidence for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EventClassification {
    /// The phase.
    pub phase: Phase,
    /// The rule that decided it.
    pub rule: PhaseRuleId,
    /// The frame that the rule matched; `NONE` if a node, a flag or the position in the program decided.
    pub evidence: FrameId,
    meaning: Option<Meaning>,
    /// Whether the classification depends on the stack, the node and the flags only, not on the program's position.
    is_position_independent: bool,
    /// Whether the autograd engine caused the event.
    in_engine: bool,
}

impl EventClassification {
    /// Whether this is a free that only the position in the program ties to a phase. `older`: the block is older than
    /// the current step. If no allocation follows such a free, it belongs to the program's teardown.
    pub fn may_be_teardown(&self, older: bool) -> bool {
        self.rule == PhaseRuleId::FreeNoPythonFrame || self.rule == PhaseRuleId::FreeByPosition && older
    }

    /// Whether the event belongs to a forward pass with gradients: of the training, or of an evaluation.
    pub fn may_record(&self) -> bool {
        self.phase == Phase::Forward || self.rule == PhaseRuleId::EvalWithoutBackward
    }

    /// The meaning of the deciding frame; `None` if no frame decided.
    pub fn meaning(&self) -> Option<Meaning> {
        self.meaning
    }
}

/// The program's position at one event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProgramPosition {
    /// The phase.
    pub phase: Phase,
    /// The step, counted from 0; `None` before the first step.
    pub step: Option<u32>,
    /// How often the phase has changed.
    pub phase_changes: u32,
    /// How many backward passes have begun.
    pub backward_passes: u32,
    /// How many optimizer steps have begun.
    pub optimizer_steps: u32,
}

impl ProgramPosition {
    /// The position in the words of a trace.
    pub fn progress(&self) -> Progress<&'static str> {
        let ProgramPosition { phase, step, phase_changes, backward_passes, optimizer_steps } = *self;
        Progress { step, phase: phase.name(), phase_changes, backward_passes, optimizer_steps }
    }

    fn of(progress: &Progress<Box<str>>) -> ProgramPosition {
        let Progress { step, phase_changes, backward_passes, optimizer_steps, .. } = *progress;
        let phase = Phase::named(&progress.phase).unwrap_or_default();
        ProgramPosition { phase, step, phase_changes, backward_passes, optimizer_steps }
    }
}

/// What a rotated trace states about the time before its kept events.
#[derive(Clone, Debug)]
struct Earlier {
    /// `seq` of the first kept event; `u64::MAX` once it has come.
    first_seq: u64,
    position: ProgramPosition,
    ended_steps: u32,
    circumstances: Circumstances,
    /// By `seq` of an allocation: where the program was, and the phase of the allocation.
    blocks: Arc<HashMap<u64, (ProgramPosition, Phase)>>,
}

/// The bits of [`Circumstances::bits`].
mod bit {
    pub(super) const MODEL_RAN: u32 = 1;
    pub(super) const STEP_OVER: u32 = 1 << 1;
    pub(super) const AFTER_OPTIMIZER: u32 = 1 << 2;
    pub(super) const LOADER_AWAITED: u32 = 1 << 3;
    pub(super) const OPTIMIZER_RUNNING: u32 = 1 << 4;
    pub(super) const PROFILER_RANGES: u32 = 1 << 5;
}

impl Earlier {
    fn of(definitions: &Definitions) -> Option<Earlier> {
        let rotation = definitions.rotation.as_ref()?;
        let block = |block: &memtrace_trace::rotation::EarlierBlock<Box<str>>| {
            (block.seq, (ProgramPosition::of(&block.progress), Phase::named(&block.phase).unwrap_or_default()))
        };
        Some(Earlier {
            first_seq: rotation.first_seq,
            position: ProgramPosition::of(&rotation.progress),
            ended_steps: rotation.ended_steps,
            circumstances: rotation.circumstances,
            blocks: Arc::new(definitions.earlier_blocks.values().map(block).collect()),
        })
    }
}

/// Whether the event reports autograd's gradient mode and the mode is off.
fn is_grad_off(e: &Event) -> bool {
    e.flags.contains(Flags::GRAD_KNOWN) && !e.flags.contains(Flags::GRAD_ENABLED)
}

/// Whether the event needs memory: an allocation, or one that failed.
fn is_request(e: &Event) -> bool {
    matches!(e.action, Action::Alloc | Action::Oom)
}

/// The kind of evidence that ends a step in this recording.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StepEnd {
    /// The profiler ranges that [`StepEnds`] evaluates.
    ProfilerRange,
    Optimizer,
    ZeroGrad,
    Backward,
    ModelCall,
}

/// Tracks phase and step while a recording streams. Events must come in the order of `seq`.
#[derive(Clone, Debug)]
pub struct PhaseTracker {
    table: StackTable,
    step_end: StepEnd,
    now: ProgramPosition,
    main_thread: ThreadId,
    step_over: bool,
    backward_passes_in_step: u32,
    backward_passes_of_first_step: Option<u32>,
    optimizer_steps_seen: u32,
    optimizer_running: bool,
    model_call: StackId,
    outside_model: bool,
    last: EventClassification,
    calls: ModelCalls,
    open_call: OpenCall,
    call_search: SearchPosition,
    /// Whether any model call has begun.
    model_ran: bool,
    /// Whether autograd recorded in the latest evaluation.
    eval_records: bool,
    /// Whether an evaluation follows the latest part of a forward pass.
    eval_in_forward: bool,
    /// The place of the latest call of an evaluation, and its phase: `Eval`, `Generate` or `Rollout`.
    forward_only: (StackId, Phase),
    /// The stacks of user code that loads batches between steps: those of the whole recording if the first pass found
    /// them, else those so far.
    data_stacks: HashSet<StackId>,
    /// Whether user code of other stacks loads no batch of the training.
    knows_batches: bool,
    /// Whether an optimizer has stepped since the last backward pass.
    after_optimizer: bool,
    /// Whether an optimizer has stepped inside the backward pass that is running.
    stepped_in_backward: bool,
    passes: Passes,
    ends: StepEnds,
    /// The index of the next end of a step and its `seq`; `u64::MAX` if there is none.
    next_end: (usize, u64),
    rules: LabelRules,
    /// Open ranges that a rule matches, innermost last.
    ranges: Vec<(ThreadId, &'static LabelRule)>,
    /// The optimizer has stepped, and the data loader has not been called since.
    loader_awaited: bool,
    /// The number of backward passes when an optimizer last began to step.
    backward_passes_at_optimizer: Option<u32>,
    /// In a rotated trace: what came before. `resumes_at`: the `seq` of its first kept event, until that has come.
    earlier: Option<Earlier>,
    resumes_at: u64,
}

/// The forward and backward passes of the current step.
#[derive(Clone, Copy, Debug, Default)]
struct Passes {
    /// The line of the first model call since the last backward pass. Libraries make the last pass of a step in the
    /// optimizer's closure, so the callers of this line differ.
    place: FrameId,
    /// The line of the latest pass, how many consecutive passes began there, and the optimizer steps before them.
    latest: (FrameId, u32, u32),
    /// The highest such number.
    most: u32,
}

/// The maximum number of ranges that are open at once. Only a program's own ranges stay open without end.
const MAX_RANGES: usize = 1024;

const START: EventClassification = EventClassification {
    phase: Phase::Load,
    rule: PhaseRuleId::LoadBeforeFirstForward,
    evidence: FrameId::NONE,
    meaning: None,
    is_position_independent: false,
    in_engine: false,
};

impl PhaseTracker {
    /// Takes a recording. Streams it once if PyTorch marks optimizer steps in it.
    pub fn of(recording: &dyn Recording) -> PhaseTracker {
        let table = StackTable::new(recording.definitions());
        let rules = LabelRules::of(recording.definitions());
        let FirstPass { ends, calls, batches, knows_batches } = first_pass(recording, &table, &rules);
        let tracker = PhaseTracker::new(table, ends, rules);
        PhaseTracker { calls, data_stacks: batches, knows_batches, ..tracker }
            .after(Earlier::of(recording.definitions()))
    }

    /// The same tracker for a recording whose earlier events were dropped.
    fn after(mut self, earlier: Option<Earlier>) -> PhaseTracker {
        if let Some(earlier) = &earlier {
            self.resumes_at = earlier.first_seq;
            if earlier.circumstances.bits & bit::PROFILER_RANGES != 0 {
                self.step_end = StepEnd::ProfilerRange;
            }
        }
        self.earlier = earlier;
        self
    }

    /// Takes over where the dropped events have left the program.
    #[cold]
    fn resume(&mut self) {
        self.resumes_at = u64::MAX;
        let Some(Earlier { position, circumstances, .. }) = self.earlier.as_ref() else { return };
        let has = |bit: u32| circumstances.bits & bit != 0;
        self.now = *position;
        self.main_thread = circumstances.main_thread;
        self.model_ran = has(bit::MODEL_RAN);
        self.step_over = has(bit::STEP_OVER);
        self.after_optimizer = has(bit::AFTER_OPTIMIZER);
        self.loader_awaited = has(bit::LOADER_AWAITED);
        self.optimizer_running = has(bit::OPTIMIZER_RUNNING);
        self.backward_passes_in_step = circumstances.backward_passes_in_step;
        self.backward_passes_of_first_step = circumstances.backward_passes_of_first_step;
        self.optimizer_steps_seen = circumstances.optimizer_steps_seen;
        (self.last, self.open_call) = (START, OpenCall::default());
    }

    /// What a trace states about the program whose events before `first_seq` are dropped, where all of these events have
    /// been observed.
    pub fn rotation(&mut self, first_seq: u64) -> Rotation<&'static str> {
        if first_seq >= self.resumes_at {
            self.resume();
        }
        if first_seq > self.next_end.1 {
            self.advance_past_step_ends(first_seq);
        }
        let bits = [
            (bit::MODEL_RAN, self.model_ran),
            (bit::STEP_OVER, self.step_over),
            (bit::AFTER_OPTIMIZER, self.after_optimizer),
            (bit::LOADER_AWAITED, self.loader_awaited),
            (bit::OPTIMIZER_RUNNING, self.optimizer_running),
            (bit::PROFILER_RANGES, self.step_end == StepEnd::ProfilerRange),
        ];
        let ended = u32::try_from(self.next_end.0).unwrap_or(u32::MAX);
        Rotation {
            first_seq,
            progress: self.now.progress(),
            ended_steps: ended.saturating_add(self.earlier.as_ref().map_or(0, |earlier| earlier.ended_steps)),
            circumstances: Circumstances {
                main_thread: self.main_thread,
                bits: bits.into_iter().filter(|(_, is_set)| *is_set).map(|(bit, _)| bit).sum(),
                backward_passes_in_step: self.backward_passes_in_step,
                backward_passes_of_first_step: self.backward_passes_of_first_step,
                optimizer_steps_seen: self.optimizer_steps_seen,
            },
            ..Rotation::default()
        }
    }

    /// The number of steps before the step in which the kept events of a rotated trace begin.
    pub fn dropped_steps(&self) -> u32 {
        self.earlier.as_ref().and_then(|earlier| earlier.position.step).unwrap_or(0)
    }

    /// Whether an event is older than the kept events of a rotated trace.
    #[inline]
    pub fn is_earlier(&self, e: &Event) -> bool {
        self.resumes_at != u64::MAX && e.seq < self.resumes_at
    }

    /// Takes the stacks, the ends of steps and the label rules of a recording.
    pub fn new(table: StackTable, ends: StepEnds, rules: LabelRules) -> PhaseTracker {
        let step_end = if !ends.all().is_empty() {
            StepEnd::ProfilerRange
        } else if table.any(Meaning::OptimizerStep) || table.any(Meaning::OptimizerState) {
            StepEnd::Optimizer
        } else if table.any(Meaning::ZeroGrad) {
            StepEnd::ZeroGrad
        } else if table.has_nodes() || table.any(Meaning::Engine) {
            StepEnd::Backward
        } else {
            StepEnd::ModelCall
        };
        PhaseTracker {
            table,
            step_end,
            now: ProgramPosition {
                phase: Phase::Load,
                step: None,
                phase_changes: 0,
                backward_passes: 0,
                optimizer_steps: 0,
            },
            main_thread: ThreadId::NONE,
            step_over: false,
            backward_passes_in_step: 0,
            backward_passes_of_first_step: None,
            optimizer_steps_seen: 0,
            optimizer_running: false,
            model_call: StackId::NONE,
            outside_model: false,
            last: START,
            calls: ModelCalls::default(),
            open_call: OpenCall::default(),
            call_search: SearchPosition::default(),
            model_ran: false,
            eval_records: false,
            eval_in_forward: false,
            forward_only: (StackId::NONE, Phase::Eval),
            data_stacks: HashSet::new(),
            knows_batches: false,
            after_optimizer: false,
            stepped_in_backward: false,
            passes: Passes::default(),
            next_end: (0, ends.all().first().copied().unwrap_or(u64::MAX)),
            ends,
            rules,
            ranges: Vec::new(),
            loader_awaited: false,
            backward_passes_at_optimizer: None,
            earlier: None,
            resumes_at: u64::MAX,
        }
    }

    /// The program's position after the last event.
    pub fn now(&self) -> &ProgramPosition {
        &self.now
    }

    /// Whether the recording shows calls of a model but no backward pass and no optimizer.
    pub fn is_inference(&self) -> bool {
        self.step_end == StepEnd::ModelCall
    }

    /// Whether user code outside the autograd engine caused the event, by its thread and stack. If so, a backward pass
    /// that began is over.
    #[inline]
    pub fn is_outside_engine(&self, e: &Event) -> bool {
        let facts = self.table.facts(e.stack);
        let plain = !self.table.is_without_python(e.stack) || e.thread == self.main_thread && !e.thread.is_none();
        plain && !facts.in_engine && !e.flags.contains(Flags::IN_BACKWARD)
    }

    /// How many micro-batches the current step has had: forward passes from one place, each with a backward pass, without
    /// an optimizer's step in between.
    pub fn micro_batches(&self) -> u32 {
        self.passes.most
    }

    /// How many steps have ended according to profiler ranges; 0 in a recording without them.
    pub fn ended_steps(&self) -> u32 {
        let ended = u32::try_from(self.ends.all().len()).unwrap_or(u32::MAX);
        ended.saturating_add(self.earlier.as_ref().map_or(0, |earlier| earlier.ended_steps))
    }

    /// By stack: by how many requested bytes a block of it grows with each call that adds a token to a cache.
    pub fn cache_growth(&self) -> &BTreeMap<StackId, u64> {
        self.calls.cache_growth()
    }

    /// The facts about stacks.
    pub fn stacks(&self) -> &StackTable {
        &self.table
    }

    /// Takes an allocation, a free or an out-of-memory event, and returns its phase.
    #[inline]
    pub fn observe(&mut self, e: &Event) -> EventClassification {
        if e.seq >= self.resumes_at {
            self.resume();
        }
        if e.seq > self.next_end.1 {
            self.advance_past_step_ends(e.seq);
        }
        let facts = self.table.facts(e.stack);
        let in_engine =
            e.flags.contains(Flags::IN_BACKWARD) || facts.in_engine || self.table.contexts().is_node(e.context);
        let mut grad_off = is_grad_off(e);
        if !in_engine {
            let records_later = self.calls.records_later(e.seq, &mut self.call_search);
            self.open_call.observe(e, facts, self.table.python(e.stack), records_later);
            grad_off |= self.calls.is_cast(e.seq, &mut self.call_search);
        }
        let place = facts.outermost_module;
        let classification = self.classify(e, facts, in_engine, grad_off);
        if e.flags.contains(Flags::PREEXISTING) {
            // The event only states that the block existed before the recording. Without evidence of its own, its phase
            // is unknown.
            let unknown = EventClassification {
                phase: Phase::Other,
                rule: PhaseRuleId::OlderThanRecording,
                evidence: FrameId::NONE,
                meaning: None,
                is_position_independent: false,
                in_engine,
            };
            let known = if classification.is_position_independent { classification } else { unknown };
            let Some((position, phase)) = self.earlier.as_ref().and_then(|earlier| earlier.blocks.get(&e.seq)) else {
                return known;
            };
            self.now = *position;
            return EventClassification { phase: *phase, ..known };
        }
        if classification.phase == Phase::Eval && classification.is_position_independent {
            self.eval_records = classification.rule == PhaseRuleId::EvalWithoutBackward;
            self.eval_in_forward = self.now.phase == Phase::Forward;
        } else if classification.phase == Phase::Forward {
            self.eval_in_forward = false;
        }
        let is_batch = classification.rule == PhaseRuleId::DataBetweenSteps;
        if is_batch && self.last.rule != classification.rule && self.step_end != StepEnd::ProfilerRange {
            self.data_stacks.insert(self.table.python(e.stack));
        }
        if classification.is_position_independent || is_request(e) {
            self.advance(e, &classification);
        }
        self.last = classification;
        if classification.phase == Phase::Eval { self.with_use(classification, place) } else { classification }
    }

    /// The classification of an event of an evaluation, with the phase that the call at `place` shows, or outside calls
    /// the latest call before.
    #[inline]
    fn with_use(&mut self, eval: EventClassification, place: StackId) -> EventClassification {
        if !place.is_none() && place != self.forward_only.0 {
            let phase = match self.calls.use_of(place) {
                ForwardOnlyUse::Evaluation => Phase::Eval,
                ForwardOnlyUse::Generation => Phase::Generate,
                ForwardOnlyUse::Rollout => Phase::Rollout,
            };
            self.forward_only = (place, phase);
        }
        let rule = match self.forward_only.1 {
            // The rule shows that such a free may be the program's teardown.
            _ if eval.rule == PhaseRuleId::FreeByPosition => eval.rule,
            Phase::Generate => PhaseRuleId::GenerateTokens,
            Phase::Rollout => PhaseRuleId::RolloutForTraining,
            _ => eval.rule,
        };
        EventClassification { phase: self.forward_only.1, rule, ..eval }
    }

    /// Takes the start or the end of a range that the program or PyTorch has named.
    pub fn observe_label(&mut self, e: &Event) {
        if e.seq >= self.resumes_at {
            self.resume();
        }
        let Some(rule) = self.rules.get(e) else { return };
        if e.action != Action::RangeStart {
            let is_it = |(thread, open): &(ThreadId, &LabelRule)| *thread == e.thread && open.id == rule.id;
            if let Some(index) = self.ranges.iter().rposition(is_it) {
                self.ranges.remove(index);
                if rule.meaning == Meaning::OptimizerStep && !e.flags.contains(Flags::IN_BACKWARD) {
                    self.loader_awaited = self.ends.loaders();
                    self.after_optimizer = true;
                }
            }
            return;
        }
        if self.ranges.len() < MAX_RANGES {
            self.ranges.push((e.thread, rule));
        }
        if e.flags.contains(Flags::IN_BACKWARD) {
            self.stepped_in_backward |= rule.meaning == Meaning::OptimizerStep;
            return;
        }
        if self.step_end != StepEnd::ProfilerRange || self.now.step.is_none() {
            return;
        }
        let phase = match rule.meaning {
            Meaning::OptimizerStep => {
                self.after_optimizer = true;
                let passes = self.now.backward_passes;
                self.now.optimizer_steps +=
                    u32::from(self.backward_passes_at_optimizer.replace(passes) != Some(passes));
                Phase::Optimizer
            }
            Meaning::Data if e.thread == self.main_thread => {
                self.loader_awaited = false;
                Phase::Data
            }
            _ => return,
        };
        self.now.phase_changes += u32::from(phase != self.now.phase);
        self.now.phase = phase;
    }

    /// Advances the step past all ends before this event.
    #[cold]
    fn advance_past_step_ends(&mut self, seq: u64) {
        while seq > self.next_end.1 {
            match &mut self.now.step {
                None => self.now.step = Some(0),
                Some(step) => *step += u32::from(self.step_over),
            }
            self.step_over = true;
            let next = self.next_end.0 + 1;
            self.next_end = (next, self.ends.all().get(next).copied().unwrap_or(u64::MAX));
        }
    }

    /// The classification of one event at the program's current position.
    fn classify(&self, e: &Event, facts: &StackFacts, in_engine: bool, grad_off: bool) -> EventClassification {
        let is_node = self.table.contexts().is_node(e.context);
        let in_backward = e.flags.contains(Flags::IN_BACKWARD) || is_node;
        let meaning = facts.rule.map(|r| r.meaning);
        let by_rule = |phase| EventClassification {
            phase,
            rule: facts.rule.map_or(PhaseRuleId::NoPhaseRule, |r| r.id),
            evidence: facts.frame,
            meaning,
            is_position_independent: true,
            in_engine,
        };
        let without_frame = |phase, rule| EventClassification {
            phase,
            rule,
            evidence: FrameId::NONE,
            meaning,
            is_position_independent: true,
            in_engine,
        };
        match meaning {
            // An optimizer's step makes no autograd nodes. A closure that the optimizer calls does.
            Some(Meaning::OptimizerStep) if facts.made_node && is_request(e) && !in_backward => {
                return without_frame(Phase::Forward, PhaseRuleId::ForwardMadeAutogradNode);
            }
            Some(Meaning::OptimizerStep) if !in_engine && self.in_closure(facts) => {
                return self.classify_by_position(e, grad_off);
            }
            Some(Meaning::ZeroGrad) => return by_rule(self.clearing_phase()),
            Some(Meaning::OptimizerStep | Meaning::OptimizerState | Meaning::GradientWork) => {
                return by_rule(Phase::Optimizer);
            }
            Some(Meaning::Data) => return by_rule(Phase::Data),
            _ => {}
        }
        if in_engine {
            if facts.in_checkpoint {
                return EventClassification {
                    rule: PhaseRuleId::RecomputeCheckpointInBackward,
                    ..by_rule(Phase::Recompute)
                };
            }
            if meaning != Some(Meaning::Engine) && self.table.recomputes(e.context) {
                return without_frame(Phase::Recompute, PhaseRuleId::RecomputeCheckpointFunction);
            }
            return match (is_node, in_backward) {
                (true, _) => without_frame(Phase::Backward, PhaseRuleId::BackwardAutogradNode),
                (false, true) => without_frame(Phase::Backward, PhaseRuleId::BackwardInsideEngine),
                (false, false) => by_rule(Phase::Backward),
            };
        }
        match meaning {
            Some(Meaning::Load) => by_rule(Phase::Load),
            Some(Meaning::NoPhase) => by_rule(Phase::Other),
            _ if self.calls.is_untrained(facts.outermost_module) => {
                without_frame(Phase::Eval, PhaseRuleId::EvalWithoutBackward)
            }
            // A reentrant checkpoint runs its forward pass without gradients, inside the node that it makes.
            Some(Meaning::Compute | Meaning::Checkpoint) if grad_off && self.evaluates(e, facts) => {
                by_rule(Phase::Eval)
            }
            Some(Meaning::Compute | Meaning::Checkpoint) if !grad_off && !self.continues_eval(facts) => {
                by_rule(Phase::Forward)
            }
            Some(Meaning::Compute | Meaning::Checkpoint) if self.trains(e, facts) => by_rule(Phase::Forward),
            // A line that also calls `backward()` frees blocks after it.
            _ if facts.made_node && is_request(e) => {
                without_frame(Phase::Forward, PhaseRuleId::ForwardMadeAutogradNode)
            }
            _ => self.classify_by_position(e, grad_off),
        }
    }

    /// Whether code without gradients is part of a forward pass with gradients.
    fn trains(&self, e: &Event, facts: &StackFacts) -> bool {
        facts.inside_node || self.open_call.records(e, facts)
    }

    /// Whether code without gradients is part of an evaluation.
    fn evaluates(&self, e: &Event, facts: &StackFacts) -> bool {
        (self.is_inference() || !facts.outermost_module.is_none()) && !self.trains(e, facts)
    }

    /// Whether a computation outside modules belongs to the evaluation with gradients that it follows: its loss.
    fn continues_eval(&self, facts: &StackFacts) -> bool {
        let follows = self.now.phase == Phase::Eval && self.eval_records;
        follows && facts.outermost_module.is_none() && !facts.made_node
    }

    /// Whether code that an optimizer's step calls is a closure, between its forward and backward passes.
    fn in_closure(&self, facts: &StackFacts) -> bool {
        facts.has_inner_frame && self.now.phase == Phase::Forward
    }

    /// The phase of clearing gradients. Between forward and backward, the forward pass's blocks are still there.
    fn clearing_phase(&self) -> Phase {
        if self.now.phase == Phase::Forward { Phase::Forward } else { Phase::Optimizer }
    }

    /// Decides by the position in the program. For user code that no rule matches.
    fn classify_by_position(&self, e: &Event, grad_off: bool) -> EventClassification {
        let by_position = |phase, rule| EventClassification {
            phase,
            rule,
            evidence: FrameId::NONE,
            meaning: None,
            is_position_independent: false,
            in_engine: false,
        };
        if let Some((_, rule)) = self.ranges.iter().rev().find(|(thread, _)| *thread == e.thread) {
            match rule.meaning {
                // Inside an optimizer's step with gradients enabled, a closure runs.
                Meaning::OptimizerStep if grad_off && self.now.phase != Phase::Forward => {
                    return by_position(Phase::Optimizer, rule.id);
                }
                Meaning::ZeroGrad => return by_position(self.clearing_phase(), rule.id),
                Meaning::Data => return by_position(Phase::Data, rule.id),
                _ => {}
            }
        }
        if !is_request(e) {
            if self.table.is_without_python(e.stack) && !matches!(self.now.phase, Phase::Backward | Phase::Recompute) {
                return by_position(Phase::Other, PhaseRuleId::FreeNoPythonFrame);
            }
            return by_position(self.now.phase, PhaseRuleId::FreeByPosition);
        }
        match self.now.phase {
            // The same line loads a batch before another step.
            Phase::Eval | Phase::Other | Phase::Load if !grad_off && self.loads_batch(e) => {
                by_position(Phase::Data, PhaseRuleId::DataBetweenSteps)
            }
            Phase::Eval if self.eval_records && !grad_off => by_position(Phase::Eval, PhaseRuleId::EvalWithoutBackward),
            Phase::Eval => by_position(Phase::Eval, PhaseRuleId::EvalOutsideModel),
            _ if !self.model_ran && self.now.step.is_none() => {
                by_position(Phase::Load, PhaseRuleId::LoadBeforeFirstForward)
            }
            Phase::Backward | Phase::Recompute if self.table.is_without_python(e.stack) => {
                by_position(self.now.phase, PhaseRuleId::BackwardNoPythonFrame)
            }
            Phase::Forward if grad_off && self.eval_in_forward => {
                by_position(Phase::Eval, PhaseRuleId::EvalOutsideModel)
            }
            Phase::Forward => by_position(Phase::Forward, PhaseRuleId::ForwardOutsideModel),
            Phase::Backward | Phase::Recompute if self.stepped_in_backward && grad_off => {
                by_position(Phase::Other, PhaseRuleId::OtherNoGradAfterStep)
            }
            Phase::Backward | Phase::Recompute if self.stepped_in_backward => {
                by_position(Phase::Data, PhaseRuleId::DataBetweenSteps)
            }
            Phase::Backward | Phase::Recompute if grad_off => {
                by_position(Phase::Optimizer, PhaseRuleId::OptimizerNoGradAfterBackward)
            }
            Phase::Optimizer | Phase::Other if self.after_optimizer && grad_off => {
                by_position(Phase::Other, PhaseRuleId::OtherNoGradAfterStep)
            }
            Phase::Optimizer if grad_off => by_position(Phase::Optimizer, PhaseRuleId::OptimizerNoGradOutsideStep),
            Phase::Optimizer | Phase::Other if self.loader_awaited => {
                by_position(Phase::Other, PhaseRuleId::OtherBeforeNextBatch)
            }
            Phase::Other if self.after_optimizer => by_position(Phase::Data, PhaseRuleId::DataBetweenSteps),
            Phase::Optimizer | Phase::Data => by_position(Phase::Data, PhaseRuleId::DataBetweenSteps),
            _ => by_position(Phase::Other, PhaseRuleId::NoPhaseRule),
        }
    }

    /// Whether user code that loads a batch of the training allocates.
    fn loads_batch(&self, e: &Event) -> bool {
        self.data_stacks.contains(&self.table.python(e.stack))
    }

    /// Moves the position on to what the event shows.
    fn advance(&mut self, e: &Event, classification: &EventClassification) {
        // An optimizer inside a backward pass does not end the pass.
        let phase = match classification.phase {
            Phase::Optimizer if classification.in_engine => Phase::Backward,
            phase => phase,
        };
        // Data loaders on other threads do not change the program's position.
        if phase == Phase::Data && e.thread != self.main_thread && !self.main_thread.is_none() {
            return;
        }
        let model_called = self.model_called(e);
        let alloc = is_request(e);
        let begins_pass = alloc && phase == Phase::Forward && self.passes.place.is_none();
        let call = if begins_pass { self.table.facts(e.stack).module_caller } else { FrameId::NONE };
        let is_same = phase == self.now.phase && classification.meaning == self.last.meaning;
        if is_same && call.is_none() && !model_called {
            return;
        }
        let meaning = classification.meaning;
        if classification.in_engine {
            self.stepped_in_backward |= matches!(meaning, Some(Meaning::OptimizerStep | Meaning::OptimizerState));
        } else if phase != Phase::Backward && std::mem::take(&mut self.stepped_in_backward) {
            self.optimizer_stepped_in_backward();
        }
        let trains = match phase {
            Phase::Forward | Phase::Backward => true,
            Phase::Eval => self.is_inference(),
            _ => false,
        };
        if alloc && (trains || phase == Phase::Eval) && !self.model_ran {
            self.model_ran = true;
            self.main_thread = e.thread;
        }
        let is_batch = classification.rule == PhaseRuleId::DataBetweenSteps;
        if alloc && self.now.step.is_none() && (trains || is_batch) {
            self.now.step = Some(0);
            self.main_thread = e.thread;
            self.step_over = false;
        } else if alloc {
            if phase == Phase::Forward && !self.step_over && self.step_ended_without_optimizer() {
                self.step_over = true;
                self.now.optimizer_steps += u32::from(self.step_end == StepEnd::Optimizer);
            }
            // Data for an evaluation does not begin a step.
            let loads_elsewhere = is_batch && self.knows_batches && !self.loads_batch(e);
            let evaluates =
                phase == Phase::Data && self.step_end == StepEnd::ProfilerRange && (is_grad_off(e) || loads_elsewhere);
            let begins = matches!(phase, Phase::Forward | Phase::Data | Phase::Backward)
                && self.step_over
                && !evaluates
                && self.calls.trains_from(e.seq);
            if begins || model_called {
                self.now.step = self.now.step.map(|s| s + 1);
                self.step_over = false;
                self.backward_passes_in_step = 0;
                self.passes = Passes::default();
            }
        }
        let runs_backward = |phase| matches!(phase, Phase::Backward | Phase::Recompute);
        if alloc && runs_backward(phase) && !runs_backward(self.now.phase) {
            self.backward_began();
        }
        if begins_pass {
            self.passes.place = call;
        }
        if phase == Phase::Optimizer || meaning == Some(Meaning::ZeroGrad) {
            self.advance_optimizer(meaning);
        } else if alloc && matches!(phase, Phase::Forward | Phase::Backward | Phase::Data | Phase::Eval) {
            self.optimizer_running = false;
        }
        let moves = match phase {
            Phase::Other => self.now.step.is_some(),
            // A teacher runs between forward and backward.
            Phase::Eval => self.now.phase != Phase::Forward,
            Phase::Optimizer if meaning == Some(Meaning::ZeroGrad) => {
                matches!(self.now.phase, Phase::Backward | Phase::Recompute)
            }
            _ => true,
        };
        if phase != self.now.phase && moves {
            // What follows an evaluation no longer follows the optimizer.
            self.after_optimizer &= phase != Phase::Eval;
            self.now.phase = phase;
            self.now.phase_changes += 1;
        }
    }

    /// Counts a backward pass that begins.
    fn backward_began(&mut self) {
        self.now.backward_passes += 1;
        self.backward_passes_in_step += 1;
        self.after_optimizer = false;
        let place = std::mem::replace(&mut self.passes.place, FrameId::NONE);
        let in_optimizer = self.ranges.iter().any(|(_, rule)| rule.meaning == Meaning::OptimizerStep);
        let (latest, count, optimizer_steps) = self.passes.latest;
        // A second backward pass through one forward pass is not a micro-batch, nor is a second pass of an optimizer's
        // closure.
        let repeats_closure = in_optimizer && !latest.is_none() && optimizer_steps == self.now.optimizer_steps;
        if place.is_none() || repeats_closure {
            return;
        }
        let steps_before = self.now.optimizer_steps.saturating_sub(u32::from(in_optimizer));
        let continues = (latest, optimizer_steps) == (place, steps_before);
        let count = if continues { count + 1 } else { 1 };
        self.passes.latest = (place, count, self.now.optimizer_steps);
        self.passes.most = self.passes.most.max(count);
    }

    /// Ends a backward pass in which optimizers stepped.
    fn optimizer_stepped_in_backward(&mut self) {
        self.after_optimizer = true;
        if self.step_end == StepEnd::ProfilerRange {
            self.now.optimizer_steps += 1;
        } else {
            self.advance_optimizer(Some(Meaning::OptimizerStep));
        }
    }

    /// Takes an event of the optimizer: its step, or clearing gradients after a backward pass.
    fn advance_optimizer(&mut self, meaning: Option<Meaning>) {
        if matches!(meaning, Some(Meaning::OptimizerStep | Meaning::OptimizerState)) {
            self.after_optimizer = true;
        }
        if self.step_end == StepEnd::ProfilerRange {
            return;
        }
        let shows = match meaning {
            Some(Meaning::OptimizerStep | Meaning::OptimizerState) => true,
            // Clearing gradients before the first backward pass of a step is no evidence of an optimizer.
            Some(Meaning::ZeroGrad) => self.backward_passes_in_step > 0,
            _ => false,
        };
        if !shows || self.optimizer_running {
            return;
        }
        self.optimizer_running = true;
        self.now.optimizer_steps += u32::from(!self.step_over);
        self.step_over |= matches!(self.step_end, StepEnd::Optimizer | StepEnd::ZeroGrad);
        self.optimizer_steps_seen += 1;
        self.backward_passes_of_first_step.get_or_insert(self.backward_passes_in_step.max(1));
    }

    /// Whether a forward pass that begins now belongs to a new step although no optimizer was seen.
    fn step_ended_without_optimizer(&self) -> bool {
        match self.step_end {
            StepEnd::Optimizer => {
                self.optimizer_steps_seen <= 1
                    && self.backward_passes_of_first_step.is_some_and(|first| self.backward_passes_in_step >= first)
            }
            StepEnd::Backward => self.backward_passes_in_step > 0,
            StepEnd::ProfilerRange | StepEnd::ZeroGrad | StepEnd::ModelCall => false,
        }
    }

    /// Whether an inference-only program calls its model again. True if the stack is that of the first call and an
    /// allocation outside the model came before.
    fn model_called(&mut self, e: &Event) -> bool {
        if self.step_end != StepEnd::ModelCall || !is_request(e) {
            return false;
        }
        let facts = self.table.facts(e.stack);
        let call = facts.outermost_compute;
        // Building a model runs its containers' code too.
        if call.is_none() || facts.rule.is_some_and(|rule| rule.meaning == Meaning::Load) {
            self.outside_model = true;
            return false;
        }
        if self.model_call.is_none() {
            self.model_call = call;
            self.outside_model = false;
        }
        self.model_call == call && std::mem::take(&mut self.outside_model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_input::MemoryRecording;
    use memtrace_trace::definition::LabelOrigin;
    use memtrace_trace::event::Source;
    use memtrace_trace::file::{Context, Frame, Label, StackNode};
    use memtrace_trace::ids::ContextId;

    /// The stacks of the test programs: user code, then the library's function that it calls.
    const STACKS: [(u32, &str, &str); 10] = [
        (1, "", ""),
        (10, "/torch/nn/modules/module.py", "_call_impl"),
        (20, "/torch/nn/modules/module.py", "_call_impl"),
        (30, "/torch/nn/modules/module.py", "_call_impl"),
        (40, "/torch/nn/functional.py", "cross_entropy"),
        (50, "/torch/optim/adam.py", "_init_group"),
        (60, "/torch/optim/optimizer.py", "zero_grad"),
        (70, "/torch/nn/functional.py", "cross_entropy"),
        (80, "/torch/optim/lbfgs.py", "step"),
        (90, "", ""),
    ];
    const PLAIN: usize = 0;
    const TRAINED: usize = 1;
    const EVALUATED: usize = 2;
    const DROPPED: usize = 3;
    const LOSS: usize = 4;
    const OPTIMIZER: usize = 5;
    const CLEARING: usize = 6;
    const DROPPED_LOSS: usize = 7;
    /// A function that the trained model calls.
    const INSIDE: usize = 10;
    const STEP: usize = 8;
    const ELSEWHERE: usize = 9;
    /// A closure that the optimizer's step calls.
    const CLOSURE: usize = 11;

    /// Records a program of one letter per allocation. `f`: in a model's call, followed by a backward pass. `n`: the same
    /// without gradients. `e`: in a call without gradients at another place. `c`: the same with gradients, a weight that
    /// autocast casts. `v`: in a call with gradients at a third place
    /// that no backward pass follows. `m`: the loss of that. `l`: the loss. `b`: in a backward pass. `o`: in an optimizer's step. `h`: the same
    /// inside a backward pass. `z`: a free while gradients are cleared. `d`: user code. `x`: user code without gradients.
    /// `y`: user code at another line.
    /// `k`: a closure's code, without gradients. `(` and `)`: an optimizer's step that calls a closure. `!`: user code that runs out of memory.
    fn record(program: &str) -> MemoryRecording {
        let mut recording = MemoryRecording::default();
        let definitions = &mut recording.definitions;
        definitions.frames.push(Frame::default());
        definitions.stacks.push(StackNode { parent: StackId::NONE, frame: FrameId::NONE });
        for (line, filename, name) in STACKS {
            let user = Frame { filename: "train.py".into(), name: "main".into(), line, ..Frame::default() };
            let library = Frame { filename: filename.into(), name: name.into(), ..Frame::default() };
            for frame in [user, library] {
                let id = FrameId(definitions.frames.len() as u32);
                let parent = if frame.line > 0 { StackId::NONE } else { StackId(definitions.stacks.len() as u32 - 1) };
                definitions.frames.push(frame);
                definitions.stacks.push(StackNode { parent, frame: id });
            }
        }
        let stack = |index: usize| StackId(2 * index as u32 + 2);
        for parent in [StackId::NONE, stack(TRAINED), StackId::NONE, stack(STEP)] {
            definitions.stacks.push(StackNode { parent, frame: FrameId(1) });
        }
        let node = |at| Context { node: "N".into(), forward: stack(at), ..Context::default() };
        definitions.contexts = vec![Context::default(), node(TRAINED), node(LOSS)];
        let label = Label { origin: LabelOrigin::RecordFunction, text: "Optimizer.step#Adam.step".into() };
        definitions.labels.insert(1, label);
        let (on, off) = (Flags::GRAD_KNOWN.with(Flags::GRAD_ENABLED), Flags::GRAD_KNOWN);
        let in_backward = Flags::IN_BACKWARD.with(off);
        for letter in program.chars().filter(|letter| *letter != ' ') {
            let (at, flags) = match letter {
                '(' | ')' => (STEP, off),
                'f' => (TRAINED, on),
                'n' => (INSIDE, off),
                'e' => (EVALUATED, off),
                'c' => (EVALUATED, on),
                'v' => (DROPPED, on),
                'l' => (LOSS, on),
                'm' => (DROPPED_LOSS, on),
                'b' => (PLAIN, in_backward),
                'o' => (OPTIMIZER, off),
                'h' => (OPTIMIZER, in_backward),
                'z' => (CLEARING, on),
                'd' | '!' => (PLAIN, on),
                'x' => (PLAIN, off),
                'y' => (ELSEWHERE, on),
                'k' => (CLOSURE, off),
                _ => panic!("{letter}"),
            };
            let action = match letter {
                'z' => Action::FreeRequested,
                '!' => Action::Oom,
                _ => Action::Alloc,
            };
            let mut add = |source, action, addr, stack| {
                let seq = recording.events.len() as u64 + 1;
                let event = Event { seq, source, action, addr, stack, flags, thread: ThreadId(1), ..Event::EMPTY };
                let context = if letter == 'b' { ContextId(1) } else { ContextId::NONE };
                recording.events.push(Event { context, ..event });
            };
            if at == OPTIMIZER || letter == '(' {
                add(Source::Label, Action::RangeStart, 1, stack(at));
            }
            if at != STEP {
                add(Source::Torch, action, 0, if letter == 'b' { StackId::NONE } else { stack(at) });
            }
            if at == OPTIMIZER || letter == ')' {
                add(Source::Label, Action::RangeEnd, 1, StackId::NONE);
            }
        }
        recording
    }

    /// The first letter of each event's phase, `.` for other, with a `|` where a step begins. And the tracker.
    fn phases(program: &str) -> (String, PhaseTracker) {
        let recording = record(program);
        let mut tracker = PhaseTracker::of(&recording);
        let (mut text, mut step) = (String::new(), None);
        for e in &recording.events {
            if e.source == Source::Label {
                tracker.observe_label(e);
                continue;
            }
            let phase = tracker.observe(e).phase;
            if tracker.now().step != step {
                step = tracker.now().step;
                text.push('|');
            }
            text.push_str(if phase == Phase::Other { "." } else { &phase.name()[..1] });
        }
        (text, tracker)
    }

    #[test]
    fn phases_and_steps_of_programs() {
        let cases = [
            ("a plain loop", "xdflbo dflbo", "l|dffbo|dffbo"),
            ("one step", "dflbo", "l|ffbo"),
            ("gradients are cleared after the step", "flboz dflboz", "|ffboo|dffboo"),
            ("gradients are cleared between forward and backward", "flzbo flzbo", "|fffbo|fffbo"),
            ("part of a forward pass has no gradients", "fnflbo fnlbo", "|ffffbo|fffbo"),
            ("a forward pass begins without gradients", "nflbo nnflbo", "|fffbo|ffffbo"),
            ("evaluation after a step", "flbo exee flbo", "|ffboeeee|ffbo"),
            ("evaluation before the training", "dee dflbo", "leee|ffbo"),
            ("evaluation after the training, with batches", "flbo flbo dedee", "|ffbo|ffbodeeee"),
            ("evaluation with gradients", "flbo dvmvm flbo dvmvm", "|ffbo|deeeeffbodeeee"),
            ("such an evaluation loads its own batches", "dflbo dflbo yvmyvm dflbo yvm", "|dffbo|dffbodeeeee|dffbodee"),
            ("a second stage fails in its first forward pass", "dflbo dflbo yv!", "|dffbo|dffbo|dff"),
            ("the first forward pass fails before its backward pass", "dfl!", "l|fff"),
            ("a forward pass at a new place fails", "flbo v!", "|ffbo|ff"),
            ("evaluation under autocast", "flbo ceece flbo ce", "|ffboeeeee|ffboee"),
            ("evaluation under autocast before the training", "ce dflbo ce", "eee|ffboee"),
            ("batches after an evaluation", "flbo dflbo e dflbo", "|ffbo|dffboe|dffbo"),
            ("a teacher between forward and backward", "fezlbo fexlbo", "|feffbo|feefbo"),
            ("optimizers inside a backward pass", "fl bhbhb fl bhbhb", "|ffbobob|ffbobob"),
            ("batches after such a backward pass", "dfl bhb xdfl bhb", "|dffbob.|dffbob"),
            ("user code without gradients after the step", "flbo xx flbo xd flbo", "|ffbo..|ffbo.|dffbo"),
            ("user code without gradients before the step", "flbxo flbxo", "|ffboo|ffboo"),
            ("a closure's code before and after its backward pass", "flkbk flkbko", "|fffbofffboo"),
            ("a backward pass fails", "flbo fl!", "|ffbo|fff"),
        ];
        for (what, program, expected) in cases {
            assert_eq!(phases(program).0, expected, "{what}: {program}");
        }
    }

    #[test]
    fn optimizers_inside_a_backward_pass_do_not_end_it() {
        let (_, tracker) = phases("fl bhbhb fl bhbhb fl");
        assert_eq!((tracker.now().backward_passes, tracker.now().optimizer_steps), (2, 2));
        assert_eq!(tracker.ended_steps(), 2);
    }

    #[test]
    fn micro_batches_are_counted() {
        let cases = [
            ("flbo", 1),
            ("flb flb flb", 3),
            ("flb flbo flb", 1),
            ("flbbb", 1),
            ("flb lb lb", 1),
            ("vlb", 1),
            ("flb (flb)", 2),
            ("(flb flb)", 1),
        ];
        for (program, expected) in cases {
            assert_eq!(phases(program).1.micro_batches(), expected, "{program}");
        }
    }
}
