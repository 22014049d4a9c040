//! The phase of one event: what its stack, its node and its flags prove, else the position in the program.

use memtrace_trace::event::{Event, Flags};
use memtrace_trace::ids::FrameId;

use super::PhaseTracker;
use super::event::{EventClassification, Phase, is_request};
use crate::passes::stacks::StackFacts;
use crate::rules::{Meaning, PhaseRuleId};

impl PhaseTracker {
    /// The classification of one event at the program's current position.
    pub(super) fn classify(
        &self,
        e: &Event,
        facts: &StackFacts,
        in_engine: bool,
        grad_off: bool,
    ) -> EventClassification {
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
            _ if self.evaluations.calls.is_untrained(facts.outermost_module) => {
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
        facts.inside_node || self.evaluations.open_call.records(e, facts)
    }

    /// Whether code without gradients is part of an evaluation.
    fn evaluates(&self, e: &Event, facts: &StackFacts) -> bool {
        (self.is_inference() || !facts.outermost_module.is_none()) && !self.trains(e, facts)
    }

    /// Whether a computation outside modules belongs to the evaluation with gradients that it follows: its loss.
    fn continues_eval(&self, facts: &StackFacts) -> bool {
        let follows = self.now.phase == Phase::Eval && self.evaluations.records;
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
            Phase::Eval if self.evaluations.records && !grad_off => {
                by_position(Phase::Eval, PhaseRuleId::EvalWithoutBackward)
            }
            Phase::Eval => by_position(Phase::Eval, PhaseRuleId::EvalOutsideModel),
            _ if !self.model_ran && self.now.step.is_none() && !self.table.is_without_pytorch() => {
                by_position(Phase::Load, PhaseRuleId::LoadBeforeFirstForward)
            }
            Phase::Backward | Phase::Recompute if self.table.is_without_python(e.stack) => {
                by_position(self.now.phase, PhaseRuleId::BackwardNoPythonFrame)
            }
            Phase::Forward if grad_off && self.evaluations.in_forward => {
                by_position(Phase::Eval, PhaseRuleId::EvalOutsideModel)
            }
            Phase::Forward => by_position(Phase::Forward, PhaseRuleId::ForwardOutsideModel),
            Phase::Backward | Phase::Recompute if self.optimizer.stepped_in_backward && grad_off => {
                by_position(Phase::Other, PhaseRuleId::OtherNoGradAfterStep)
            }
            Phase::Backward | Phase::Recompute if self.optimizer.stepped_in_backward => {
                by_position(Phase::Data, PhaseRuleId::DataBetweenSteps)
            }
            Phase::Backward | Phase::Recompute if grad_off => {
                by_position(Phase::Optimizer, PhaseRuleId::OptimizerNoGradAfterBackward)
            }
            Phase::Optimizer | Phase::Other if self.optimizer.has_stepped && grad_off => {
                by_position(Phase::Other, PhaseRuleId::OtherNoGradAfterStep)
            }
            Phase::Optimizer if grad_off => by_position(Phase::Optimizer, PhaseRuleId::OptimizerNoGradOutsideStep),
            Phase::Optimizer | Phase::Other if self.optimizer.awaits_loader => {
                by_position(Phase::Other, PhaseRuleId::OtherBeforeNextBatch)
            }
            Phase::Other if self.optimizer.has_stepped => by_position(Phase::Data, PhaseRuleId::DataBetweenSteps),
            Phase::Optimizer | Phase::Data => by_position(Phase::Data, PhaseRuleId::DataBetweenSteps),
            _ => by_position(Phase::Other, PhaseRuleId::NoPhaseRule),
        }
    }

    /// Whether user code that loads a batch of the training allocates.
    pub(super) fn loads_batch(&self, e: &Event) -> bool {
        self.batches.stacks.contains(&self.table.python(e.stack))
    }
}
