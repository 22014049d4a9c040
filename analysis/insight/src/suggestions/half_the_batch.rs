//! Half the batch, where gradients cannot be accumulated.

use super::change::{Change, ChangedBlocks, Cost, FORWARD_ONLY, Order, SuggestionRule};
use super::facts::Facts;
use super::recorded::batch::{Batches, halve};
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::HalfTheBatch,
    action: "half the batch",
    condition: "The run has no backward pass, or several in a step with gradients of their own. Not for engines that \
                serve models (vLLM, SGLang): they choose their batches.",
    method: "Activations, inputs, autograd temporaries and temporaries of the model halve. Results that are kept do \
             not.",
    cost: Cost::SmallerSteps,
    code: &["for part in inputs.chunk(2):  # {call}", "    output = model(part)"],
    link: "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader",
    at_most: false,
    programs: &["gan", "inference"],
    find,
};

#[derive(Debug)]
struct HalfTheBatch;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let phase = facts.run.phase;
    let has_batches = facts.run.has_backward || phase == Phase::Forward || phase.is_forward_only();
    let is_possible = matches!(facts.batches, Batches::Several | Batches::Inference) && !facts.ends_in_evaluation();
    if is_possible && has_batches && !facts.is_served() { Some(Box::new(HalfTheBatch)) } else { None }
}

impl Change for HalfTheBatch {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Batch
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        halve(&facts.recorded, facts.is_training(), &mut blocks.spans);
    }

    fn phases(&self) -> &'static [Phase] {
        FORWARD_ONLY
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suggestions::test_program::{Find, interrupted_optimizer, one_step};

    const HALF: Find = |_| Some(Box::new(HalfTheBatch));

    #[test]
    fn activations_halve_and_gradients_do_not() {
        assert_eq!(one_step().peak_with(HALF), 40 + 50 + 40);
    }

    #[test]
    fn after_an_error_in_the_first_optimizer_step_the_state_and_the_next_step_follow() {
        let (program, failed) = interrupted_optimizer();
        let (weights, gradients, moments) = (40, 40, 80);
        // The next forward and backward pass beside all moments: 100 MiB of activations and the gradients.
        assert_eq!(program.with_failure(|_| None, failed), weights + moments + 100 + gradients);
        assert_eq!(program.with_failure(HALF, failed), weights + moments + 50 + gradients);
    }
}
