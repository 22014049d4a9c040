//! No gradients for parameters that no optimizer has.

use std::collections::{BTreeSet, HashSet};

use memtrace_trace::ids::ContextId;

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value, WITH_STATE};
use super::facts::Facts;
use super::no_grad::without_gradients;
use super::recorded::calls::{Call, Members};
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::FreezeUnused,
    action: "requires_grad_(False) for the parameters that no optimizer has: {count} gradients stay from step to step",
    condition: "Gradients outlive all optimizer steps, and the program clears others after each step.",
    method: "These gradients vanish, and those that later backward passes add to them. If they are all gradients of a \
             model whose first module passes none on, its calls keep nothing for a backward pass.",
    cost: Cost::Free,
    code: &[
        r#"trained = {id(p) for group in optimizer.param_groups for p in group["params"]}"#,
        "for p in model.parameters():  # before the first step",
        "    p.requires_grad_(id(p) in trained)",
    ],
    link: "https://docs.pytorch.org/docs/stable/notes/autograd.html#setting-requires-grad",
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
        let frozen = frozen_models(facts);
        if frozen.is_empty() {
            return;
        }
        let members = Members::outermost(recorded);
        let calls: Vec<Call> = facts.outermost.iter().filter(|call| frozen.contains(&call.member)).cloned().collect();
        without_gradients(recorded, &calls, &mut blocks.spans);
        for (span, block) in blocks.spans.iter_mut().zip(&recorded.blocks) {
            // Another node then allocates the workspace of cuBLAS.
            let of_node = block.start.phase == Phase::Backward && block.category != Category::Workspace;
            if of_node && frozen.contains(&members.get(block.start.context)) {
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

/// The outermost modules whose gradients are all unused, and whose first module passes no gradient on: nothing before
/// them is trained, so autograd records nothing once they are frozen.
fn frozen_models(facts: &Facts<'_>) -> BTreeSet<u32> {
    let Facts { recorded, unused_gradients, outermost, .. } = facts;
    let members = Members::outermost(recorded);
    let (mut unused, mut used) = (BTreeSet::new(), BTreeSet::from([0]));
    let passing = |block: &BlockLifetime| recorded.is_passing_weight_gradient(block);
    for (index, block) in recorded.blocks.iter().enumerate().filter(|(_, block)| block.category == Category::Gradient) {
        if unused_gradients.binary_search(&(index as u32)).is_ok() {
            unused.insert(members.get(block.start.context));
        } else if !passing(block) {
            used.insert(members.get(block.start.context));
        }
    }
    unused.retain(|member| !used.contains(member));
    let module = |context| recorded.contexts().module(context);
    let first_of =
        |call: &Call| call.blocks.first().map(|index| module(recorded.blocks[*index as usize].start.context));
    let calls = outermost.iter().filter(|call| unused.contains(&call.member));
    let first_modules: HashSet<ContextId> = calls.filter_map(first_of).collect();
    let passes_on = |block: &&BlockLifetime| {
        block.start.phase == Phase::Backward
            && first_modules.contains(&module(block.start.context))
            && !matches!(block.category, Category::Gradient | Category::Workspace)
            && block.freed_context != block.start.context
            && !passing(block)
    };
    let passing_on = recorded.blocks.iter().filter(passes_on).map(|block| members.get(block.start.context));
    passing_on.for_each(|member| {
        unused.remove(&member);
    });
    unused
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suggestions::test_program::{FIRST, NODE_OF_FIRST, NODE_OF_SECOND, Program, SECOND};

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

    /// A teacher of two layers, none of whose gradients is used, after code that is not trained; or, with `trained`,
    /// after a model that is.
    fn teacher(trained: bool) -> Program {
        let mut program = Program::default();
        for step in 0..5 {
            program.step = step;
            let saved = [100, 50, 10].map(|mib| program.activation(mib, FIRST));
            program.passes += 1;
            let used = program.alloc(30, Phase::Backward, Category::Gradient, ContextId::NONE);
            if step == 0 {
                program.alloc(20, Phase::Backward, Category::Gradient, NODE_OF_FIRST);
            }
            let passed_on = trained.then(|| program.alloc(1, Phase::Backward, Category::AutogradDetail, NODE_OF_FIRST));
            saved.iter().for_each(|block| program.free(*block, NODE_OF_FIRST));
            passed_on.iter().for_each(|block| program.free(*block, ContextId::NONE));
            let of_step = program.alloc(1, Phase::Optimizer, Category::Temporary, ContextId::NONE);
            program.free(of_step, ContextId::NONE);
            program.free(used, ContextId::NONE);
        }
        program
    }

    #[test]
    fn a_model_without_used_gradients_keeps_nothing_for_backward() {
        assert_eq!(teacher(false).peak(), 160 + 30 + 20);
        assert_eq!(teacher(false).peak_with(find), 160, "in the forward pass");
        assert_eq!(teacher(true).peak_with(find), 160 + 30 + 1, "what comes before it is trained");
    }
}
