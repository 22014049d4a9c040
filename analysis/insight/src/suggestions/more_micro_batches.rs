//! Half of each micro-batch, and twice as many, for a program that accumulates gradients.

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::batch::{Batches, halve};
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::MoreMicroBatches,
    action: "half of each micro-batch: {twice} in a step instead of {count}",
    condition: "Each step accumulates the gradients of several backward passes.",
    method: "Activations, inputs, autograd temporaries and temporaries of the model halve.",
    cost: Cost::SmallerSteps,
    code: &[
        "micro_batches = {twice}  # instead of {count}: each has half of the samples",
        "for part, target in zip(inputs.chunk(micro_batches), labels.chunk(micro_batches)):  # {call}",
        "    (loss_fn(model(part), target) / micro_batches).backward()",
    ],
    link: "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation",
    at_most: false,
    programs: &["accumulation"],
    find,
};

#[derive(Debug)]
struct MoreMicroBatches {
    /// The number of micro-batches in a step today.
    count: u16,
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    match facts.batches {
        Batches::Accumulated(count) if facts.gathered.is_empty() && !facts.ends_in_evaluation() => {
            Some(Box::new(MoreMicroBatches { count }))
        }
        _ => None,
    }
}

impl Change for MoreMicroBatches {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Batch
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        halve(&facts.recorded, true, &mut blocks.spans);
    }

    fn values(&self, _facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        let count = u32::from(self.count);
        vec![("count", Value::Text(count.to_string())), ("twice", Value::Text((2 * count).to_string()))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suggestions::test_program::one_step;

    #[test]
    fn activations_halve_and_nothing_runs_twice() {
        assert_eq!(one_step().peak_with(|_| Some(Box::new(MoreMicroBatches { count: 2 }))), 40 + 50 + 40);
    }
}
