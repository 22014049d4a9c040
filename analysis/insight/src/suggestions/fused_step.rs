//! A fused step of the optimizer, without temporaries.

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value, WITH_STATE};
use super::facts::Facts;
use super::recorded::optimizer_step::{can_fuse, remove_temporaries};
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::FusedStep,
    action: "fused=True for {optimizer}",
    condition: "The optimizer's step allocates temporaries, and PyTorch has a fused variant of the optimizer.",
    method: "The temporaries of the step vanish.",
    cost: Cost::Free,
    code: &["optimizer = torch.optim.{optimizer}(model.parameters(), lr=lr, fused=True)"],
    link: "https://docs.pytorch.org/docs/stable/optim.html",
    at_most: false,
    programs: &["wide", "finetune"],
    find,
};

#[derive(Debug)]
pub(super) struct FusedStep;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    if facts.optimizer_name().is_some_and(|name| can_fuse(&name)) { Some(Box::new(FusedStep)) } else { None }
}

impl Change for FusedStep {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::OptimizerStep
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        remove_temporaries(&facts.recorded, &mut blocks.spans);
    }

    fn phases(&self) -> &'static [Phase] {
        WITH_STATE
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        vec![("optimizer", Value::Text(facts.optimizer_text()))]
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::passes::category::Category;
    use crate::suggestions::test_program::{STEP, one_step};

    #[test]
    fn the_step_needs_no_temporaries() {
        let mut program = one_step();
        for _ in 0..4 {
            let temporary = program.alloc(100, Phase::Optimizer, Category::Temporary, ContextId::NONE);
            program.blocks[temporary].start.stack = STEP;
        }
        assert_eq!(program.peak(), 40 + 1 + 400);
        assert_eq!(program.peak_with(|_| Some(Box::new(FusedStep))), 40 + 100 + 40);
    }
}
