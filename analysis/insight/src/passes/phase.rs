//! Assigns a phase and a step to each event.
//!
//! Most events prove their phase on their own: an autograd node is running (backward), or the stack has a frame that a
//! rule matches. Such a classification depends only on the stack, the node and the flags. The remaining events come
//! from user code that no rule matches. Their position in the program decides. Before the first forward pass they are
//! loading. Between forward and backward they belong to the forward pass (the loss). Before a step's forward pass they
//! load data.
//!
//! A step is one iteration of the loop that the program's optimizers drive. PyTorch marks calls of optimizers from 2.1
//! on, with profiler ranges. These ranges give the exact end of each step, even where the optimizer allocates nothing
//! ([`super::steps`]). What follows the last optimizer of a step still belongs to it: clearing gradients, metrics, an
//! evaluation without gradients. The next step begins with the first block of a forward pass with gradients, of a
//! backward pass, or of data loading with gradients enabled.
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

use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::ids::{FrameId, StackId, ThreadId};

use super::stacks::StackTable;
use super::steps::{LabelRules, StepEnds};
use crate::rules::{LabelRule, Meaning, PhaseRuleId};
use memtrace_input::Recording;

/// What the program is doing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, serde::Serialize, schemars::JsonSchema)]
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
    /// Forward computations without gradients.
    Eval,
    /// Anything else.
    #[default]
    Other,
}

impl Phase {
    /// All phases, in the order in which reports list them.
    pub const ALL: [Phase; 8] = [
        Phase::Load,
        Phase::Data,
        Phase::Forward,
        Phase::Backward,
        Phase::Recompute,
        Phase::Optimizer,
        Phase::Eval,
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
            Phase::Other => "other",
        }
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
}

impl EventClassification {
    /// Whether this is a free that only the position in the program ties to a phase. `older`: the block is older than
    /// the current step. If no allocation follows such a free, it belongs to the program's teardown.
    pub fn may_be_teardown(&self, older: bool) -> bool {
        self.rule == PhaseRuleId::FreeNoPythonFrame || self.rule == PhaseRuleId::FreeByPosition && older
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

/// Whether the event reports autograd's gradient mode and the mode is off.
fn is_grad_off(e: &Event) -> bool {
    e.flags.contains(Flags::GRAD_KNOWN) && !e.flags.contains(Flags::GRAD_ENABLED)
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
}

/// The maximum number of ranges that are open at once. Only a program's own ranges stay open without end.
const MAX_RANGES: usize = 1024;

const START: EventClassification = EventClassification {
    phase: Phase::Load,
    rule: PhaseRuleId::LoadBeforeFirstForward,
    evidence: FrameId::NONE,
    meaning: None,
    is_position_independent: false,
};

impl PhaseTracker {
    /// Takes a recording. Streams it once if PyTorch marks optimizer steps in it.
    pub fn of(recording: &dyn Recording) -> PhaseTracker {
        let table = StackTable::new(recording.definitions());
        PhaseTracker::new(table, StepEnds::of(recording), LabelRules::of(recording.definitions()))
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
            next_end: (0, ends.all().first().copied().unwrap_or(u64::MAX)),
            ends,
            rules,
            ranges: Vec::new(),
            loader_awaited: false,
            backward_passes_at_optimizer: None,
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

    /// How many steps have ended according to profiler ranges; 0 in a recording without them.
    pub fn ended_steps(&self) -> u32 {
        u32::try_from(self.ends.all().len()).unwrap_or(u32::MAX)
    }

    /// The facts about stacks.
    pub fn stacks(&self) -> &StackTable {
        &self.table
    }

    /// Takes an allocation, a free or an out-of-memory event, and returns its phase.
    #[inline]
    pub fn observe(&mut self, e: &Event) -> EventClassification {
        if e.seq > self.next_end.1 {
            self.advance_past_step_ends(e.seq);
        }
        let classification = self.classify(e);
        if e.flags.contains(Flags::PREEXISTING) {
            // The event only states that the block existed before the recording. Without evidence of its own, its phase
            // is unknown.
            let unknown = EventClassification {
                phase: Phase::Other,
                rule: PhaseRuleId::OlderThanRecording,
                evidence: FrameId::NONE,
                meaning: None,
                is_position_independent: false,
            };
            return if classification.is_position_independent { classification } else { unknown };
        }
        if classification.is_position_independent || e.action == Action::Alloc {
            self.advance(e, &classification);
        }
        self.last = classification;
        classification
    }

    /// Takes the start or the end of a range that the program or PyTorch has named.
    pub fn observe_label(&mut self, e: &Event) {
        let Some(rule) = self.rules.get(e) else { return };
        if e.action != Action::RangeStart {
            let is_it = |(thread, open): &(ThreadId, &LabelRule)| *thread == e.thread && open.id == rule.id;
            if let Some(index) = self.ranges.iter().rposition(is_it) {
                self.ranges.remove(index);
                if rule.meaning == Meaning::OptimizerStep {
                    self.loader_awaited = self.ends.loaders();
                }
            }
            return;
        }
        if self.ranges.len() < MAX_RANGES {
            self.ranges.push((e.thread, rule));
        }
        if self.step_end != StepEnd::ProfilerRange || self.now.step.is_none() || e.flags.contains(Flags::IN_BACKWARD) {
            return;
        }
        let phase = match rule.meaning {
            Meaning::OptimizerStep => {
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
    fn classify(&self, e: &Event) -> EventClassification {
        let facts = self.table.facts(e.stack);
        let is_node = self.table.contexts().is_node(e.context);
        let in_backward = e.flags.contains(Flags::IN_BACKWARD) || is_node;
        let grad_off = is_grad_off(e);
        let meaning = facts.rule.map(|r| r.meaning);
        let by_rule = |phase| EventClassification {
            phase,
            rule: facts.rule.map_or(PhaseRuleId::NoPhaseRule, |r| r.id),
            evidence: facts.frame,
            meaning,
            is_position_independent: true,
        };
        let without_frame = |phase, rule| EventClassification {
            phase,
            rule,
            evidence: FrameId::NONE,
            meaning,
            is_position_independent: true,
        };
        match meaning {
            // An optimizer's step makes no autograd nodes. A closure that the optimizer calls does.
            Some(Meaning::OptimizerStep) if facts.made_node && !in_backward => {
                return without_frame(Phase::Forward, PhaseRuleId::ForwardMadeAutogradNode);
            }
            Some(Meaning::OptimizerStep | Meaning::OptimizerState | Meaning::GradientWork | Meaning::ZeroGrad) => {
                return by_rule(Phase::Optimizer);
            }
            Some(Meaning::Data) => return by_rule(Phase::Data),
            _ => {}
        }
        if in_backward || facts.in_engine {
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
            Some(Meaning::Engine) => by_rule(Phase::Backward),
            Some(Meaning::Load) => by_rule(Phase::Load),
            // A reentrant checkpoint runs its forward pass without gradients, inside the node that it makes.
            Some(Meaning::Compute | Meaning::Checkpoint) if grad_off && !facts.inside_node => by_rule(Phase::Eval),
            Some(Meaning::Compute | Meaning::Checkpoint) => by_rule(Phase::Forward),
            Some(Meaning::NoPhase) => by_rule(Phase::Other),
            _ if facts.made_node => without_frame(Phase::Forward, PhaseRuleId::ForwardMadeAutogradNode),
            _ => self.classify_by_position(e, grad_off),
        }
    }

    /// Decides by the position in the program. For user code that no rule matches.
    fn classify_by_position(&self, e: &Event, grad_off: bool) -> EventClassification {
        let by_position = |phase, rule| EventClassification {
            phase,
            rule,
            evidence: FrameId::NONE,
            meaning: None,
            is_position_independent: false,
        };
        if let Some((_, rule)) = self.ranges.iter().rev().find(|(thread, _)| *thread == e.thread) {
            match rule.meaning {
                // Inside an optimizer's step with gradients enabled, a closure runs.
                Meaning::OptimizerStep if grad_off => return by_position(Phase::Optimizer, rule.id),
                Meaning::ZeroGrad => return by_position(Phase::Optimizer, rule.id),
                Meaning::Data => return by_position(Phase::Data, rule.id),
                _ => {}
            }
        }
        if e.action != Action::Alloc {
            if self.table.is_without_python(e.stack) && !matches!(self.now.phase, Phase::Backward | Phase::Recompute) {
                return by_position(Phase::Other, PhaseRuleId::FreeNoPythonFrame);
            }
            return by_position(self.now.phase, PhaseRuleId::FreeByPosition);
        }
        match self.now.phase {
            _ if self.now.step.is_none() => by_position(Phase::Load, PhaseRuleId::LoadBeforeFirstForward),
            Phase::Backward | Phase::Recompute if self.table.is_without_python(e.stack) => {
                by_position(self.now.phase, PhaseRuleId::BackwardNoPythonFrame)
            }
            Phase::Forward => by_position(Phase::Forward, PhaseRuleId::ForwardOutsideModel),
            Phase::Eval => by_position(Phase::Eval, PhaseRuleId::EvalOutsideModel),
            Phase::Backward | Phase::Recompute if grad_off => {
                by_position(Phase::Optimizer, PhaseRuleId::OptimizerNoGradAfterBackward)
            }
            Phase::Optimizer if grad_off => by_position(Phase::Optimizer, PhaseRuleId::OptimizerNoGradOutsideStep),
            Phase::Optimizer if self.loader_awaited => by_position(Phase::Other, PhaseRuleId::OtherBeforeNextBatch),
            Phase::Optimizer if !grad_off => by_position(Phase::Data, PhaseRuleId::DataBetweenSteps),
            Phase::Data => by_position(Phase::Data, PhaseRuleId::DataBetweenSteps),
            _ => by_position(Phase::Other, PhaseRuleId::NoPhaseRule),
        }
    }

    /// Moves the position on to what the event shows.
    fn advance(&mut self, e: &Event, classification: &EventClassification) {
        let phase = classification.phase;
        // Data loaders on other threads do not change the program's position.
        if phase == Phase::Data && e.thread != self.main_thread && !self.main_thread.is_none() {
            return;
        }
        let model_called = self.model_called(e);
        if phase == self.now.phase && classification.meaning == self.last.meaning && !model_called {
            return;
        }
        let alloc = e.action == Action::Alloc;
        let computes = matches!(phase, Phase::Forward | Phase::Backward | Phase::Eval);
        if alloc && self.now.step.is_none() && computes {
            self.now.step = Some(0);
            self.main_thread = e.thread;
            self.step_over = false;
        } else if alloc {
            if phase == Phase::Forward && !self.step_over && self.step_ended_without_optimizer() {
                self.step_over = true;
                self.now.optimizer_steps += u32::from(self.step_end == StepEnd::Optimizer);
            }
            // Data for an evaluation does not begin a step.
            let evaluates = phase == Phase::Data && self.step_end == StepEnd::ProfilerRange && is_grad_off(e);
            let begins =
                matches!(phase, Phase::Forward | Phase::Data | Phase::Backward) && self.step_over && !evaluates;
            if begins || model_called {
                self.now.step = self.now.step.map(|s| s + 1);
                self.step_over = false;
                self.backward_passes_in_step = 0;
            }
        }
        if phase == Phase::Backward && alloc && !matches!(self.now.phase, Phase::Backward | Phase::Recompute) {
            self.now.backward_passes += 1;
            self.backward_passes_in_step += 1;
        }
        if phase == Phase::Optimizer {
            self.advance_optimizer(classification.meaning);
        } else if alloc && matches!(phase, Phase::Forward | Phase::Backward | Phase::Data | Phase::Eval) {
            self.optimizer_running = false;
        }
        if phase != self.now.phase && !(self.now.step.is_none() && phase == Phase::Other) {
            self.now.phase = phase;
            self.now.phase_changes += 1;
        }
    }

    /// Takes an event of the optimizer: its step, or clearing gradients after a backward pass.
    fn advance_optimizer(&mut self, meaning: Option<Meaning>) {
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
        if self.step_end != StepEnd::ModelCall || e.action != Action::Alloc {
            return false;
        }
        let call = self.table.facts(e.stack).outermost_compute;
        if call.is_none() {
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
