//! No gradients for parameters that no optimizer has.

use std::collections::HashSet;

use super::change::{Change, ChangedBlocks, Order, SuggestionRule, Value, WITH_STATE};
use super::facts::Facts;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::FreezeUnused,
    action: "requires_grad_(False) for the parameters that no optimizer has: {count} gradients stay from step to step",
    condition: "Gradients outlive all optimizer steps, and the program clears others after each step.",
    method: "These gradients vanish, and those that later backward passes add to them.",
    at_most: true,
    programs: &["heads"],
    find,
};

#[derive(Debug)]
struct FreezeUnused;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    if facts.unused_gradients.is_empty() { None } else { Some(Box::new(FreezeUnused)) }
}

impl Change for FreezeUnused {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Gradients
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        let Facts { recorded, unused_gradients, .. } = facts;
        let place = |index: usize| {
            let block = &recorded.blocks[index];
            (block.start.context, block.requested())
        };
        let places: HashSet<_> = unused_gradients.iter().map(|index| place(*index as usize)).collect();
        for (index, span) in blocks.spans.iter_mut().enumerate().take(recorded.blocks.len()) {
            let is_added = || recorded.is_passing_weight_gradient(&recorded.blocks[index]);
            let is_unused = unused_gradients.binary_search(&(index as u32)).is_ok();
            if is_unused || places.contains(&place(index)) && is_added() {
                span.vanish();
            }
        }
    }

    fn phases(&self) -> &'static [Phase] {
        WITH_STATE
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        vec![("count", Value::Text(facts.unused_gradients.len().to_string()))]
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::passes::category::Category;
    use crate::suggestions::test_program::{NODE_OF_FIRST, NODE_OF_SECOND, Program, SECOND};

    #[test]
    fn gradients_that_no_optimizer_uses_vanish() {
        let mut program = Program::default();
        for step in 0..5 {
            program.step = step;
            let saved = program.activation(100, SECOND);
            program.passes += 1;
            let used = program.alloc(30, Phase::Backward, Category::Gradient, NODE_OF_FIRST);
            if step == 0 {
                program.alloc(20, Phase::Backward, Category::Gradient, NODE_OF_SECOND);
            }
            program.free(saved, NODE_OF_SECOND);
            let of_step = program.alloc(1, Phase::Optimizer, Category::Temporary, ContextId::NONE);
            program.free(of_step, ContextId::NONE);
            program.free(used, ContextId::NONE);
        }
        assert_eq!(program.peak(), 100 + 30 + 20);
        assert_eq!(program.peak_with(find), 100 + 30);
    }
}
