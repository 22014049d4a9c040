//! Half-precision copies of weights that autocast keeps until its region ends, for no backward pass. Without the cache
//! each copy lasts for one operation.

use memtrace_trace::ids::StackId;

use super::change::{Change, ChangedBlocks, Cost, FORWARD_ONLY, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::span::after;
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::NoAutocastCache,
    action: "torch.autocast(..., cache_enabled=False) around {place}, which needs no gradients: it keeps no copies of \
             weights",
    condition: "Autocast keeps copies of weights in a forward pass without gradients.",
    method: "Each of these copies ends with the operation that it was made for.",
    cost: Cost::Free,
    code: &[
        r#"with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):"#,
        "    output = model(inputs)  # {place}",
    ],
    link: "https://docs.pytorch.org/docs/stable/amp.html#torch.autocast",
    at_most: false,
    programs: &["sweep"],
    find,
};

/// The indices of the copies, each with the last event of its operation.
#[derive(Debug)]
struct NoAutocastCache {
    copies: Vec<(u32, u32)>,
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let copies = copies(&facts.recorded, facts.is_training());
    if copies.is_empty() { None } else { Some(Box::new(NoAutocastCache { copies })) }
}

impl Change for NoAutocastCache {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Kept
    }

    fn apply(&self, _facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        for (index, end) in &self.copies {
            blocks.spans[*index as usize].end_by(after(*end));
        }
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        matches!(other, RuleId::Bfloat16Model | RuleId::NoGrad)
    }

    fn phases(&self) -> &'static [Phase] {
        FORWARD_ONLY
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        let block = |index: u32| &facts.recorded.blocks[index as usize];
        let first = self.copies.first().map_or(StackId::NONE, |(index, _)| block(*index).start.stack);
        vec![("place", Value::Line(first))]
    }
}

/// The copies of weights that no backward pass needs, each with the last event of its operation: the allocation of what
/// the operation computes.
fn copies(recorded: &Recorded<'_>, is_training: bool) -> Vec<(u32, u32)> {
    let is_copy = |block: &BlockLifetime| {
        let needs_none = block.start.phase.is_forward_only() || block.start.phase == Phase::Forward && !is_training;
        block.category == Category::AutocastCache && needs_none
    };
    let (mut found, mut open) = (Vec::new(), Vec::new());
    for event in recorded.events.iter().filter(|event| event.allocates) {
        if is_copy(&recorded.blocks[event.block as usize]) {
            open.push(event.block);
        } else if !open.is_empty() {
            found.extend(open.drain(..).map(|index| (index, event.seq)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::suggestions::test_program::{FIRST, Program, SECOND};

    #[test]
    fn copies_of_weights_end_with_their_operation() {
        let mut program = Program::default();
        let mut copies = Vec::new();
        let mut last = program.alloc(10, Phase::Eval, Category::Activation, ContextId::NONE);
        for layer in [FIRST, SECOND] {
            copies.push(program.alloc(50, Phase::Eval, Category::AutocastCache, layer));
            let result = program.alloc(10, Phase::Eval, Category::Activation, layer);
            program.free(last, layer);
            last = result;
        }
        copies.into_iter().for_each(|copy| program.free(copy, ContextId::NONE));
        assert_eq!(program.peak(), 2 * 50 + 20);
        assert_eq!(program.peak_with(find), 50 + 20);
    }
}
