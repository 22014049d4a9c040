//! Gradients that are freed right after the optimizer's step.

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, WITH_STATE};
use super::facts::Facts;
use super::recorded::optimizer_step;
use super::recorded::span::{Key, Span, after, at};
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, NEVER};
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::SetToNone,
    action: "optimizer.zero_grad(set_to_none=True) right after optimizer.step()",
    condition: "Gradients exist in the forward pass after the optimizer's step.",
    method: "Gradients end with the optimizer's step. The next backward pass allocates them.",
    cost: Cost::Free,
    code: &[
        "optimizer.step()",
        "optimizer.zero_grad(set_to_none=True)  # here, not after the next forward pass ({call})",
    ],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
    at_most: false,
    programs: &["zeroed"],
    find,
};

#[derive(Debug)]
struct SetToNone;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    if facts.is_training() { Some(Box::new(SetToNone)) } else { None }
}

impl Change for SetToNone {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Gradients
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        clear_gradients(facts, &mut blocks.spans);
    }

    fn phases(&self) -> &'static [Phase] {
        WITH_STATE
    }
}

/// Frees gradients right after the optimizer's step. Gradients that exist already when a backward pass begins are then
/// allocated by that pass.
fn clear_gradients(facts: &Facts<'_>, spans: &mut [Span]) {
    let recorded = &facts.recorded;
    let ends = optimizer_step::ends(recorded);
    let end_of = |step: u32| {
        let found = ends.binary_search_by_key(&step, |(step, _)| *step).ok()?;
        Some(after(ends[found].1))
    };
    let mut lasting = Vec::new();
    for (index, span) in spans.iter_mut().enumerate() {
        let block = &recorded.blocks[index.min(recorded.blocks.len() - 1)];
        // The program clears the others already.
        let is_unused = facts.unused_gradients.binary_search(&(index as u32)).is_ok();
        if block.category != Category::Gradient || is_unused || block.start.step == BEFORE_STEPS || !span.exists() {
            continue;
        }
        if let Some(end) = end_of(block.start.step).filter(|end| *end > span.start && *end < span.end) {
            if block.freed == NEVER || span.end > end_of(block.start.step + 1).unwrap_or(Key::MAX) {
                lasting.push(span.requested);
            }
            span.end_by(end);
        }
    }
    if lasting.is_empty() {
        return;
    }
    for (span, block) in spans.iter_mut().zip(&recorded.blocks) {
        if recorded.is_passing_weight_gradient(block) && lasting.contains(&span.requested) {
            span.last_until(end_of(block.start.step).unwrap_or(at(block.allocated)));
        }
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::suggestions::test_program::{FIRST, NODE_OF_FIRST, Program};

    #[test]
    fn gradients_do_not_exist_in_the_next_forward_pass() {
        let mut program = Program::default();
        let mut earlier = None;
        for step in 0..2 {
            program.step = step;
            let saved = program.activation(100, FIRST);
            let temporary = program.activation(50, FIRST);
            program.free(temporary, FIRST);
            if let Some(gradient) = earlier {
                program.free(gradient, ContextId::NONE);
            }
            program.passes += 1;
            earlier = Some(program.alloc(20, Phase::Backward, Category::Gradient, NODE_OF_FIRST));
            program.free(saved, NODE_OF_FIRST);
            let of_step = program.alloc(1, Phase::Optimizer, Category::Temporary, ContextId::NONE);
            program.free(of_step, ContextId::NONE);
        }
        assert_eq!(program.peak(), 20 + 100 + 50);
        assert_eq!(program.peak_with(find), 100 + 50);
    }
}
