//! Half the batch in evaluations, in generation or in rollouts.

use super::change::{Change, ChangedBlocks, Cost, FORWARD_ONLY, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::batch::{joined, kept_places};
use super::recorded::span::Span;
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::SmallerEvaluationBatch,
    action: "half the batch in {evaluation}",
    condition: "The peak is in an evaluation, in generation or in a rollout of a training run, and no blocks of a \
                training step are allocated.",
    method: "What it computes halves, but not the results that it keeps.",
    cost: Cost::SmallerSteps,
    code: &["loader = DataLoader(dataset, batch_size=batch_size // 2)  # in {evaluation}: {call}"],
    link: "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader",
    at_most: false,
    programs: &["validation", "evaluation"],
    find,
};

#[derive(Debug)]
struct SmallerEvaluationBatch;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let is_beside_training = || {
        let is_evaluation = facts.run.phase.is_forward_only() && facts.run.has_backward;
        is_evaluation && facts.is_training() && !facts.peak_is_in_training_step()
    };
    if facts.ends_in_evaluation() || is_beside_training() { Some(Box::new(SmallerEvaluationBatch)) } else { None }
}

impl Change for SmallerEvaluationBatch {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Batch
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        halve_evaluation(&facts.recorded, &mut blocks.spans);
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        matches!(other, RuleId::SmallerBatches | RuleId::MoreMicroBatches | RuleId::HalfTheBatch)
    }

    fn phases(&self) -> &'static [Phase] {
        FORWARD_ONLY
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        let evaluation = match facts.run.phase {
            Phase::Generate => "generation",
            Phase::Rollout => "rollouts",
            _ => "evaluations",
        };
        vec![("evaluation", Value::Text(evaluation.to_owned()))]
    }
}

/// Halves what an evaluation computes.
fn halve_evaluation(recorded: &Recorded<'_>, spans: &mut [Span]) {
    let kept = kept_places(recorded);
    let joined = joined(recorded, &kept);
    let passes = recorded.blocks.last().map_or(0, |block| block.start.backward_passes);
    // An evaluation with gradients that an error ends looks like a forward pass of training.
    let is_interrupted = |block: &BlockLifetime| {
        recorded.ends_in_unused_graph && block.start.phase == Phase::Forward && block.start.backward_passes == passes
    };
    for span in spans {
        let block = &recorded.blocks[span.block as usize];
        let computed = matches!(block.category, Category::Activation | Category::Temporary | Category::Input);
        if (block.start.phase.is_forward_only() || is_interrupted(block))
            && computed
            && !kept.contains(&(block.start.stack, block.start.context))
            && !joined.contains(&span.block)
        {
            span.requested = span.requested.div_ceil(2);
        }
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::passes::lifetimes::BEFORE_STEPS;
    use crate::suggestions::test_program::{FIRST, Program, SECOND};

    #[test]
    fn smaller_evaluation_batches_keep_as_many_results() {
        let mut program = Program::default();
        let weight = program.alloc(10, Phase::Load, Category::Parameter, ContextId::NONE);
        program.blocks[weight].start.step = BEFORE_STEPS;
        let batches = 4;
        for _ in 0..batches {
            let hidden = program.alloc(100, Phase::Eval, Category::Activation, FIRST);
            // A loop inside the model that keeps what it computes until its end.
            let parts = [(), ()].map(|()| program.alloc(30, Phase::Eval, Category::Activation, SECOND));
            parts.into_iter().for_each(|part| program.free(part, SECOND));
            program.alloc(20, Phase::Eval, Category::Activation, ContextId::NONE);
            program.free(hidden, ContextId::NONE);
        }
        let results = 20 * batches;
        assert_eq!(program.peak(), 10 + results - 20 + 100 + 60);
        assert_eq!(program.peak_with(|_| Some(Box::new(SmallerEvaluationBatch))), 10 + results - 20 + 50 + 30);
    }
}
