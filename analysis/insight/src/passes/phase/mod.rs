//! Assigns a phase and a step to each event.
//!
//! Most events prove their phase on their own: an autograd node is running (backward), or the stack has a frame that a
//! rule matches. Such a classification depends only on the stack, the node and the flags. The remaining events come
//! from user code that no rule matches. Their position in the program decides. Before the first forward pass they are
//! loading. Between forward and backward they belong to the forward pass (the loss). Before a step's forward pass they
//! load data. Without PyTorch, all allocations are [`Phase::Other`].
//!
//! An evaluation is the outermost call of a module in which autograd does not record. Generation and rollouts are
//! evaluations to the position in the program; only their name differs ([`super::forward_only`]). Code without
//! gradients inside a forward pass with gradients (a rotary embedding) belongs to that forward pass
//! ([`super::model_calls`]). Some code does not move the position: clearing gradients, an evaluation between forward
//! and backward (a teacher), and an optimizer inside a backward pass.
//!
//! A step is one iteration of the loop that the program's optimizers drive. PyTorch marks calls of optimizers from 2.1
//! on, with profiler ranges. These ranges give the exact end of each step, even where the optimizer allocates nothing
//! ([`super::steps`]). Events after the last optimizer of a step still belong to it: clearing gradients, metrics, an
//! evaluation. The next step begins with the first block of a forward pass with gradients, of a backward pass, or of
//! data loading with gradients enabled. An evaluation begins no step, nor does anything after the last forward or
//! backward pass of the training.
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

mod advance;
mod classify;
mod dropped;
mod evaluations;
mod event;
mod resume;
mod step_machine;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::ids::{FrameId, StackId, ThreadId};

pub use event::{EventClassification, Phase, ProgramPosition};

use super::forward_only::CacheGrowthTable;
use super::stacks::StackTable;
use super::steps::{LabelRules, TrainingLoop};
use crate::rules::{LabelRule, Meaning, PhaseRuleId};
use dropped::Dropped;
use evaluations::Evaluations;
use event::{START, is_grad_off, is_request};
use memtrace_input::Recording;
use step_machine::{StepEvidence, StepMachine};

/// The progress of the program's optimizers.
#[derive(Clone, Copy, Debug, Default)]
struct OptimizerProgress {
    /// Whether an optimizer's step is running, in a recording without profiler ranges.
    is_running: bool,
    /// Whether an optimizer has stepped since the last backward pass.
    has_stepped: bool,
    /// Whether an optimizer has stepped inside the backward pass that is running.
    stepped_in_backward: bool,
    /// The optimizer has stepped, and the data loader has not been called since.
    awaits_loader: bool,
    /// The number of backward passes when an optimizer last began to step.
    backward_passes_at_step: Option<u32>,
}

/// The user code that loads batches of the training between steps.
#[derive(Clone, Debug, Default)]
struct Batches {
    /// Its stacks: those of the whole recording if the first pass found them, else those so far.
    stacks: HashSet<StackId>,
    /// Whether user code of other stacks loads no batch of the training.
    are_known: bool,
}

/// Tracks phase and step while a recording streams. Events must come in the order of `seq`.
#[derive(Clone, Debug)]
pub struct PhaseTracker {
    table: Arc<StackTable>,
    rules: LabelRules,
    now: ProgramPosition,
    last: EventClassification,
    main_thread: ThreadId,
    /// Whether any model call has begun.
    model_ran: bool,
    /// Open ranges that a rule matches, innermost last.
    ranges: Vec<(ThreadId, &'static LabelRule)>,
    steps: StepMachine,
    optimizer: OptimizerProgress,
    evaluations: Evaluations,
    batches: Batches,
    dropped: Dropped,
}

/// The maximum number of ranges that are open at once. Only a program's own ranges stay open without end.
const MAX_RANGES: usize = 1024;

impl PhaseTracker {
    /// The tracker of a recording. Streams it once if PyTorch marks optimizer steps in it. With a
    /// [`FirstPass`](super::FirstPass), [`FirstPass::tracker`](super::FirstPass::tracker) does not stream it again.
    pub fn of(recording: &dyn Recording) -> PhaseTracker {
        let table = StackTable::new(recording.definitions());
        let rules = LabelRules::of(recording.definitions());
        let training = TrainingLoop::of(recording, &table, &rules);
        PhaseTracker::new(recording, Arc::new(table), rules, training)
    }

    pub(super) fn new(
        recording: &dyn Recording,
        table: Arc<StackTable>,
        rules: LabelRules,
        training: TrainingLoop,
    ) -> PhaseTracker {
        let TrainingLoop { ends, calls, batches, knows_batches } = training;
        let dropped = Dropped::of(recording);
        let begins_in = if table.is_without_pytorch() { Phase::Other } else { Phase::Load };
        PhaseTracker {
            steps: StepMachine::new(&table, ends, dropped.had_profiler_ranges()),
            last: EventClassification { phase: begins_in, ..START },
            table,
            rules,
            now: ProgramPosition { phase: begins_in, ..ProgramPosition::default() },
            main_thread: ThreadId::NONE,
            model_ran: false,
            ranges: Vec::new(),
            optimizer: OptimizerProgress::default(),
            evaluations: Evaluations::new(calls),
            batches: Batches { stacks: batches, are_known: knows_batches },
            dropped,
        }
    }

    /// The program's position after the last event.
    pub fn now(&self) -> &ProgramPosition {
        &self.now
    }

    /// Whether the recording shows calls of a model but no backward pass and no optimizer.
    pub fn is_inference(&self) -> bool {
        self.steps.evidence == StepEvidence::ModelCall
    }

    /// Whether user code outside the autograd engine caused the event, by its thread and stack. If so, a backward pass
    /// that began is over.
    #[inline]
    pub fn is_outside_engine(&self, e: &Event) -> bool {
        let facts = self.table.facts(e.stack);
        let plain = !self.table.is_without_python(e.stack) || e.thread == self.main_thread && !e.thread.is_none();
        plain && !facts.in_engine && !e.flags.contains(Flags::IN_BACKWARD)
    }

    /// How many micro-batches the current step has had: forward passes from one place, each with a backward pass,
    /// without an optimizer's step in between.
    pub fn micro_batches(&self) -> u32 {
        self.steps.passes.most
    }

    /// How many steps have ended according to profiler ranges; 0 in a recording without them.
    pub fn ended_steps(&self) -> u32 {
        let ended = u32::try_from(self.steps.ends.all().len()).unwrap_or(u32::MAX);
        ended.saturating_add(self.dropped.ended_steps())
    }

    /// How caches grow with each call that adds a token.
    pub fn cache_growth(&self) -> &CacheGrowthTable {
        self.evaluations.calls.cache_growth()
    }

    /// The facts about stacks.
    pub fn stacks(&self) -> &StackTable {
        &self.table
    }

    /// Observes an allocation, a free or an out-of-memory event, and returns its phase.
    #[inline]
    pub fn observe(&mut self, e: &Event) -> EventClassification {
        if e.seq >= self.dropped.resumes_at {
            self.resume();
        }
        if e.seq > self.steps.next_end.1 {
            self.steps.advance_past_ends(e.seq, &mut self.now.step);
        }
        let facts = self.table.facts(e.stack);
        let in_engine =
            e.flags.contains(Flags::IN_BACKWARD) || facts.in_engine || self.table.contexts().is_node(e.context);
        let mut grad_off = is_grad_off(e);
        if !in_engine {
            let records_later = self.evaluations.calls.records_later(e.seq, &mut self.evaluations.search);
            self.evaluations.open_call.observe(e, facts, self.table.python(e.stack), records_later);
            grad_off |= self.evaluations.calls.is_cast(e.seq, &mut self.evaluations.search);
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
            let Some((position, phase)) = self.dropped.earlier.as_ref().and_then(|earlier| earlier.blocks.get(&e.seq))
            else {
                return known;
            };
            self.now = *position;
            return EventClassification { phase: *phase, ..known };
        }
        if classification.phase == Phase::Eval && classification.is_position_independent {
            self.evaluations.records = classification.rule == PhaseRuleId::EvalWithoutBackward;
            self.evaluations.in_forward = self.now.phase == Phase::Forward;
        } else if classification.phase == Phase::Forward {
            self.evaluations.in_forward = false;
        }
        let is_batch = classification.rule == PhaseRuleId::DataBetweenSteps;
        if is_batch && self.last.rule != classification.rule && self.steps.evidence != StepEvidence::ProfilerRange {
            self.batches.stacks.insert(self.table.python(e.stack));
        }
        if classification.is_position_independent || is_request(e) {
            self.advance(e, &classification);
        }
        self.last = classification;
        if classification.phase == Phase::Eval {
            self.evaluations.with_use(classification, place)
        } else {
            classification
        }
    }

    /// Observes the start or the end of a range that the program or PyTorch has named.
    pub fn observe_label(&mut self, e: &Event) {
        if e.seq >= self.dropped.resumes_at {
            self.resume();
        }
        let Some(rule) = self.rules.get(e) else { return };
        if e.action != Action::RangeStart {
            let is_it = |(thread, open): &(ThreadId, &LabelRule)| *thread == e.thread && open.id == rule.id;
            if let Some(index) = self.ranges.iter().rposition(is_it) {
                self.ranges.remove(index);
                if rule.meaning == Meaning::OptimizerStep && !e.flags.contains(Flags::IN_BACKWARD) {
                    self.optimizer.awaits_loader = self.steps.ends.loaders();
                    self.optimizer.has_stepped = true;
                }
            }
            return;
        }
        if self.ranges.len() < MAX_RANGES {
            self.ranges.push((e.thread, rule));
        }
        if e.flags.contains(Flags::IN_BACKWARD) {
            self.optimizer.stepped_in_backward |= rule.meaning == Meaning::OptimizerStep;
            return;
        }
        if self.steps.evidence != StepEvidence::ProfilerRange || self.now.step.is_none() {
            return;
        }
        let phase = match rule.meaning {
            Meaning::OptimizerStep => {
                self.optimizer.has_stepped = true;
                let passes = self.now.backward_passes;
                self.now.optimizer_steps +=
                    u32::from(self.optimizer.backward_passes_at_step.replace(passes) != Some(passes));
                Phase::Optimizer
            }
            Meaning::Data if e.thread == self.main_thread => {
                self.optimizer.awaits_loader = false;
                Phase::Data
            }
            _ => return,
        };
        self.now.phase_changes += u32::from(phase != self.now.phase);
        self.now.phase = phase;
    }
}
