//! An optimizer that steps inside the backward pass, parameter by parameter.

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value, WITH_STATE};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::batch::{Batches, passing_end};
use super::recorded::optimizer_step::{in_step, remove_temporaries};
use super::recorded::span::Span;
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::{Meaning, RuleId};

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::OptimizerInBackward,
    action: "step {optimizer} in the backward pass (register_post_accumulate_grad_hook), one parameter at a time",
    condition: "Each step has one backward pass, and nothing works on all gradients together.",
    method: "Each gradient is freed when it is complete. The step needs one temporary of the parameter's size.",
    cost: Cost::MoreKernels,
    code: &[
        "optimizers = {p: torch.optim.{optimizer}([p], lr=lr) for p in model.parameters()}",
        "def update(p):",
        "    optimizers[p].step()",
        "    optimizers[p].zero_grad()",
        "for p in model.parameters():",
        "    p.register_post_accumulate_grad_hook(update)  # and no step() after backward()",
    ],
    link: "https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html",
    at_most: false,
    programs: &["wide", "contrastive"],
    find,
};

#[derive(Debug)]
pub(super) struct OptimizerInBackward;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    facts.optimizer_name()?;
    let is_possible = facts.batches == Batches::One && !works_on_gradients(&facts.recorded);
    if is_possible { Some(Box::new(OptimizerInBackward)) } else { None }
}

impl Change for OptimizerInBackward {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::OptimizerStep
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        step_in_backward(&facts.recorded, &mut blocks.spans);
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        matches!(other, RuleId::FusedStep | RuleId::SingleTensorStep | RuleId::EightBitMoments)
    }

    fn phases(&self) -> &'static [Phase] {
        WITH_STATE
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        vec![("optimizer", Value::Text(facts.optimizer_text()))]
    }
}

/// Steps the optimizer for each parameter as soon as its gradient is complete, and frees the gradient. If the step
/// needs temporaries, the step for one parameter needs one of the parameter's size.
fn step_in_backward(recorded: &Recorded<'_>, spans: &mut Vec<Span>) {
    let has_temporaries = recorded.blocks.iter().any(|block| in_step(recorded, block));
    let mut added = Vec::new();
    for span in spans.iter_mut() {
        let block = &recorded.blocks[span.block as usize];
        if block.category == Category::Gradient && block.start.phase == Phase::Backward && span.exists() {
            span.end_by(passing_end(recorded, block));
            if has_temporaries {
                let start = span.end.saturating_sub(2).max(span.start);
                added.push(Span { start, ..*span });
            }
        }
    }
    spans.extend(added);
    remove_temporaries(recorded, spans);
}

/// Whether the program works on all gradients together before the step, such as clipping their norm.
fn works_on_gradients(recorded: &Recorded<'_>) -> bool {
    let is_work = |b: &BlockLifetime| {
        b.start.phase == Phase::Optimizer
            && recorded.table.facts(b.start.stack).rule.is_some_and(|r| r.meaning == Meaning::GradientWork)
    };
    recorded.blocks.iter().any(is_work)
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::suggestions::test_program::{NET, NODE_OF_FIRST, NODE_OF_SECOND, Program, STEP};

    #[test]
    fn an_optimizer_in_the_backward_pass_never_has_all_gradients() {
        let mut program = Program::default();
        let activations = program.activation(100, NET);
        program.passes = 1;
        let gradients = [NODE_OF_SECOND, NODE_OF_FIRST, NODE_OF_SECOND]
            .map(|node| program.alloc(20, Phase::Backward, Category::Gradient, node));
        program.free(activations, NODE_OF_FIRST);
        program.alloc(1, Phase::Optimizer, Category::Temporary, ContextId::NONE);
        gradients.into_iter().for_each(|gradient| program.free(gradient, ContextId::NONE));
        assert_eq!(program.peak(), 160);
        assert_eq!(program.peak_with(|_| Some(Box::new(OptimizerInBackward))), 100 + 20, "one gradient");
        program.blocks[4].start.stack = STEP;
        assert_eq!(
            program.peak_with(|_| Some(Box::new(OptimizerInBackward))),
            100 + 20 + 20,
            "one gradient and one temporary of the step"
        );
    }
}
