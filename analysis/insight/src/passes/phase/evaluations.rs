//! Calls of models that no backward pass follows: evaluation, generation and rollouts.

use memtrace_trace::ids::StackId;

use super::event::{EventClassification, Phase};
use crate::passes::model_calls::{ModelCalls, OpenCall, SearchPosition};
use crate::rules::{ForwardOnlyUse, PhaseRuleId};

/// The state of the calls of models, and of the evaluation that runs.
#[derive(Clone, Debug)]
pub(super) struct Evaluations {
    pub(super) calls: ModelCalls,
    pub(super) open_call: OpenCall,
    pub(super) search: SearchPosition,
    /// Whether autograd recorded in the latest evaluation.
    pub(super) records: bool,
    /// Whether an evaluation follows the latest part of a forward pass.
    pub(super) in_forward: bool,
    /// The place of the latest call of an evaluation, and its phase: `Eval`, `Generate` or `Rollout`.
    latest: (StackId, Phase),
}

impl Evaluations {
    pub(super) fn new(calls: ModelCalls) -> Evaluations {
        Evaluations {
            calls,
            open_call: OpenCall::default(),
            search: SearchPosition::default(),
            records: false,
            in_forward: false,
            latest: (StackId::NONE, Phase::Eval),
        }
    }

    /// The classification of an event of an evaluation, with the phase that the call at `place` shows, or outside calls
    /// the latest call before.
    #[inline]
    pub(super) fn with_use(&mut self, eval: EventClassification, place: StackId) -> EventClassification {
        if !place.is_none() && place != self.latest.0 {
            let phase = match self.calls.use_of(place) {
                ForwardOnlyUse::Evaluation => Phase::Eval,
                ForwardOnlyUse::Generation => Phase::Generate,
                ForwardOnlyUse::Rollout => Phase::Rollout,
            };
            self.latest = (place, phase);
        }
        let rule = match self.latest.1 {
            // The rule shows that such a free may be the program's teardown.
            _ if eval.rule == PhaseRuleId::FreeByPosition => eval.rule,
            Phase::Generate => PhaseRuleId::GenerateTokens,
            Phase::Rollout => PhaseRuleId::RolloutForTraining,
            _ => eval.rule,
        };
        EventClassification { phase: self.latest.1, rule, ..eval }
    }
}
