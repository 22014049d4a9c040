//! Forward passes that no backward pass follows, without gradients.
//!
//! Without gradients a block is freed when the last operation that reads it is done ([`super::recorded::reads`]),
//! except for the last blocks of the outermost call, which are its results.

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::calls::{Call, RESULTS};
use super::recorded::reads::{is_read_by, read_until};
use super::recorded::span::{Span, after};
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::NoGrad,
    action: "torch.no_grad() for the forward passes that no backward pass follows",
    condition: "Calls of a model keep at least three blocks for a backward pass, and no backward pass frees any of \
                them.",
    method: "Blocks of such a call, except the last two, are freed when the code after them has run. This code is \
             the module that gets them as arguments, the next operation of their statement, or the code that assigned \
             them to a variable.",
    cost: Cost::Free,
    code: &["with torch.no_grad():  # {call}", "    output = model(inputs)"],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.no_grad.html",
    at_most: false,
    programs: &["evaluation", "layers"],
    find,
};

/// A graph has at least this many blocks that outlive the call.
const GRAPH_BLOCKS: usize = 3;

/// Calls that build a graph which no backward pass uses.
#[derive(Debug)]
struct NoGrad {
    unused: Vec<Call>,
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let unused = unused_graphs(&facts.recorded, &facts.outermost);
    if unused.is_empty() { None } else { Some(Box::new(NoGrad { unused })) }
}

impl Change for NoGrad {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Kept
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        without_gradients(&facts.recorded, &self.unused, &mut blocks.spans);
    }

    fn stops_growth(&self) -> bool {
        true
    }
}

/// Whether a call's block lives longer because autograd records.
fn is_result(block: &BlockLifetime) -> bool {
    matches!(block.category, Category::Activation | Category::Temporary | Category::AutocastCache)
}

/// Those of the outermost calls that build a graph which no backward pass uses. A graph that stays up to the end of
/// the recording is one of them only if the recording ends in an evaluation: other graphs of a recording without any
/// backward pass were freed unused.
fn unused_graphs(recorded: &Recorded<'_>, calls: &[Call]) -> Vec<Call> {
    let is_unused = |call: &Call, ends_in_evaluation: bool| {
        let end = call.end(recorded);
        let kept = || {
            let blocks = call.blocks.iter().map(|index| &recorded.blocks[*index as usize]);
            blocks.filter(|block| is_result(block) && (block.freed > end || !recorded.is_freed(block)))
        };
        let is_unused = |block: &BlockLifetime| match recorded.is_freed(block) {
            true => !recorded.is_freed_by_node(block),
            false => ends_in_evaluation,
        };
        kept().count() >= GRAPH_BLOCKS && kept().all(is_unused)
    };
    let has_backward = || recorded.events.iter().any(|event| recorded.contexts().is_node(event.context));
    let ends_in_evaluation =
        recorded.ends_in_unused_graph || !has_backward() && calls.iter().any(|call| is_unused(call, false));
    calls.iter().filter(|call| is_unused(call, ends_in_evaluation)).cloned().collect()
}

/// Inputs of a call are at most so many inputs before it.
const INPUTS: usize = 16;

/// Frees the blocks of these calls as without gradients.
pub(super) fn without_gradients(recorded: &Recorded<'_>, unused: &[Call], spans: &mut [Span]) {
    let is_input = |index: &u32| recorded.blocks[*index as usize].category == Category::Input;
    let inputs: Vec<u32> = (0..recorded.blocks.len() as u32).filter(is_input).collect();
    for call in unused {
        let end = call.end(recorded);
        free_inputs(recorded, call, &inputs, spans);
        let outlives = |index: &&u32| recorded.blocks[**index as usize].freed > end;
        let mut results: Vec<u32> = call.blocks.iter().rev().filter(outlives).take(RESULTS).copied().collect();
        let block = |index: u32| &recorded.blocks[index as usize];
        if let [last, before] = results[..]
            && is_read_by(recorded, block(before), block(last))
        {
            results.pop();
        }
        for (index, read) in call.blocks.iter().zip(read_until(recorded, call)) {
            let block = &recorded.blocks[*index as usize];
            if is_result(block) && block.freed > end && !results.contains(index) {
                // Autocast keeps its copies of weights until it ends.
                let is_cast = block.category == Category::AutocastCache;
                spans[*index as usize].end_by(if is_cast { after(end) } else { read });
            }
        }
    }
}

/// Frees the inputs that only the graph of a call kept: those that were freed with it. The next input replaces them.
fn free_inputs(recorded: &Recorded<'_>, call: &Call, inputs: &[u32], spans: &mut [Span]) {
    let block = |index: u32| &recorded.blocks[index as usize];
    let Some(first) = call.blocks.first() else { return };
    let end = call.end(recorded);
    let own = call.blocks.iter().map(|index| block(*index)).filter(|own| is_result(own) && own.freed > end);
    let frees: Vec<u32> = own.map(|own| own.freed).collect();
    let (Some(since), Some(until)) = (frees.iter().min(), frees.iter().max()) else { return };
    let (before, later) = inputs.split_at(inputs.partition_point(|input| input < first));
    let Some(next) = later.iter().map(|input| block(*input).allocated).find(|allocated| *allocated > end) else {
        return;
    };
    for input in before.iter().rev().take(INPUTS) {
        if recorded.is_freed(block(*input)) && (*since..=*until).contains(&block(*input).freed) {
            spans[*input as usize].end_by(after(next));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suggestions::test_program::{FIRST, NET, SECOND, evaluated};

    #[test]
    fn without_gradients_values_of_one_statement_are_freed_when_the_next_operation_has_read_them() {
        // second(relu(first(x))), and what the caller makes of it.
        let program = evaluated(&[(100, FIRST, 0), (100, NET, 0), (100, SECOND, 0), (1, NET, 1), (1, NET, 1)]);
        assert_eq!(program.peak(), 302);
        assert_eq!(program.peak_with(find), 200);
    }

    #[test]
    fn without_gradients_a_variable_stays_until_the_code_that_assigned_it_reads_it() {
        // x = first(x) + 1; x = x + second(x), and what the caller makes of it.
        let blocks = [(10, FIRST, 0), (100, NET, 0), (30, SECOND, 1), (100, NET, 1), (1, NET, 1), (1, NET, 1)];
        assert_eq!(evaluated(&blocks).peak_with(find), 230);
    }

    #[test]
    fn where_gradients_are_off_already_nothing_is_suggested() {
        let mut program = evaluated(&[(100, FIRST, 0), (100, NET, 0), (100, SECOND, 0), (1, NET, 1), (1, NET, 1)]);
        program.blocks.iter_mut().for_each(|block| block.start.is_without_gradients = true);
        assert_eq!(program.peak_with(find), 302);
    }
}
