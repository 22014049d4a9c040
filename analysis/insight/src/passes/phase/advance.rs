//! Moves the program's position on to what an event shows: phase, step, passes and optimizer steps.

use memtrace_trace::event::Event;
use memtrace_trace::ids::FrameId;

use super::PhaseTracker;
use super::event::{EventClassification, Phase, is_grad_off, is_request};
use super::step_machine::StepEvidence;
use crate::rules::{Meaning, PhaseRuleId};

impl PhaseTracker {
    /// Moves the position on to what the event shows.
    pub(super) fn advance(&mut self, e: &Event, classification: &EventClassification) {
        // An optimizer inside a backward pass does not end the pass.
        let phase = match classification.phase {
            Phase::Optimizer if classification.in_engine => Phase::Backward,
            phase => phase,
        };
        // Data loaders on other threads do not change the program's position.
        if phase == Phase::Data && e.thread != self.main_thread && !self.main_thread.is_none() {
            return;
        }
        let model_called = self.steps.model_called(e, &self.table);
        let alloc = is_request(e);
        let begins_pass = alloc && phase == Phase::Forward && self.steps.passes.place.is_none();
        let call = if begins_pass { self.table.facts(e.stack).module_caller } else { FrameId::NONE };
        let is_same = phase == self.now.phase && classification.meaning == self.last.meaning;
        if is_same && call.is_none() && !model_called {
            return;
        }
        let meaning = classification.meaning;
        if classification.in_engine {
            self.optimizer.stepped_in_backward |=
                matches!(meaning, Some(Meaning::OptimizerStep | Meaning::OptimizerState));
        } else if phase != Phase::Backward && std::mem::take(&mut self.optimizer.stepped_in_backward) {
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
            self.steps.is_over = false;
        } else if alloc {
            if phase == Phase::Forward && !self.steps.is_over && self.steps.ended_without_optimizer() {
                self.steps.is_over = true;
                self.now.optimizer_steps += u32::from(self.steps.evidence == StepEvidence::Optimizer);
            }
            // Data for an evaluation does not begin a step.
            let loads_elsewhere = is_batch && self.batches.are_known && !self.loads_batch(e);
            let evaluates = phase == Phase::Data
                && self.steps.evidence == StepEvidence::ProfilerRange
                && (is_grad_off(e) || loads_elsewhere);
            let begins = matches!(phase, Phase::Forward | Phase::Data | Phase::Backward)
                && self.steps.is_over
                && !evaluates
                && self.evaluations.calls.trains_from(e.seq);
            if begins || model_called {
                self.now.step = self.now.step.map(|s| s + 1);
                self.steps.begin();
            }
        }
        let runs_backward = |phase| matches!(phase, Phase::Backward | Phase::Recompute);
        if alloc && runs_backward(phase) && !runs_backward(self.now.phase) {
            self.backward_began();
        }
        if begins_pass {
            self.steps.passes.place = call;
        }
        if phase == Phase::Optimizer || meaning == Some(Meaning::ZeroGrad) {
            self.advance_optimizer(meaning);
        } else if alloc && matches!(phase, Phase::Forward | Phase::Backward | Phase::Data | Phase::Eval) {
            self.optimizer.is_running = false;
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
            // Events after an evaluation no longer follow the optimizer.
            self.optimizer.has_stepped &= phase != Phase::Eval;
            self.now.phase = phase;
            self.now.phase_changes += 1;
        }
    }

    /// Counts a backward pass that begins.
    fn backward_began(&mut self) {
        self.now.backward_passes += 1;
        self.steps.backward_passes += 1;
        self.optimizer.has_stepped = false;
        let place = std::mem::replace(&mut self.steps.passes.place, FrameId::NONE);
        let in_optimizer = self.ranges.iter().any(|(_, rule)| rule.meaning == Meaning::OptimizerStep);
        let (latest, count, optimizer_steps) = self.steps.passes.latest;
        // A second backward pass through one forward pass is not a micro-batch, nor is a second pass of an optimizer's
        // closure.
        let repeats_closure = in_optimizer && !latest.is_none() && optimizer_steps == self.now.optimizer_steps;
        if place.is_none() || repeats_closure {
            return;
        }
        let steps_before = self.now.optimizer_steps.saturating_sub(u32::from(in_optimizer));
        let continues = (latest, optimizer_steps) == (place, steps_before);
        let count = if continues { count + 1 } else { 1 };
        self.steps.passes.latest = (place, count, self.now.optimizer_steps);
        self.steps.passes.most = self.steps.passes.most.max(count);
    }

    /// Ends a backward pass in which optimizers stepped.
    fn optimizer_stepped_in_backward(&mut self) {
        self.optimizer.has_stepped = true;
        if self.steps.evidence == StepEvidence::ProfilerRange {
            self.now.optimizer_steps += 1;
        } else {
            self.advance_optimizer(Some(Meaning::OptimizerStep));
        }
    }

    /// Observes an event of the optimizer: its step, or clearing gradients after a backward pass.
    fn advance_optimizer(&mut self, meaning: Option<Meaning>) {
        if matches!(meaning, Some(Meaning::OptimizerStep | Meaning::OptimizerState)) {
            self.optimizer.has_stepped = true;
        }
        if self.steps.evidence == StepEvidence::ProfilerRange {
            return;
        }
        let shows = match meaning {
            Some(Meaning::OptimizerStep | Meaning::OptimizerState) => true,
            // Clearing gradients before the first backward pass of a step is no evidence of an optimizer.
            Some(Meaning::ZeroGrad) => self.steps.backward_passes > 0,
            _ => false,
        };
        if !shows || self.optimizer.is_running {
            return;
        }
        self.optimizer.is_running = true;
        self.now.optimizer_steps += u32::from(!self.steps.is_over);
        self.steps.is_over |= matches!(self.steps.evidence, StepEvidence::Optimizer | StepEvidence::ZeroGrad);
        self.steps.optimizer_steps += 1;
        self.steps.backward_passes_of_first.get_or_insert(self.steps.backward_passes.max(1));
    }
}
