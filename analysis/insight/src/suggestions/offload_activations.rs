//! Saved tensors in host memory, as `torch.autograd.graph.save_on_cpu()` keeps them.
//!
//! Tensors that a forward pass saves are copied to the host at once, so the forward pass keeps no more than one without
//! gradients ([`super::recorded::reads`]). Each node of the backward pass copies what it needs back when it begins, the
//! weights of linear layers and convolutions too, which are saved tensors like others.

use std::collections::HashSet;

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule};
use super::facts::Facts;
use super::recorded::reads::{read_until, unpacked_until};
use super::recorded::span::{Key, Span, after, before};
use super::recorded::{BlockEvent, Recorded};
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::OffloadActivations,
    action: "saved tensors in host memory: torch.autograd.graph.save_on_cpu() around the forward pass; slower by \
             their copies",
    condition: "The run has a backward pass.",
    method: "Blocks that only the backward pass needs are freed when the code after them has run. They are \
             allocated again for the node that frees them, with a copy of the node's weight. A result that both its \
             operation and the next one save is allocated for both.",
    cost: Cost::Transfer,
    code: &[
        "with torch.autograd.graph.save_on_cpu(pin_memory=True):  # {call}",
        "    loss = loss_fn(model(inputs), labels)",
        "loss.backward()",
    ],
    link: "https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu",
    at_most: false,
    programs: &["wavenet", "unet"],
    find,
};

#[derive(Debug)]
struct OffloadActivations;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    if facts.is_training() { Some(Box::new(OffloadActivations)) } else { None }
}

impl Change for OffloadActivations {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Saved
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        offload(facts, &blocks.recomputed, &mut blocks.spans);
    }
}

/// The nodes that save a weight.
const WITH_WEIGHT: &[&str] = &["AddmmBackward", "MmBackward", "LinearBackward", "ConvolutionBackward"];

/// Nodes that save the result of their operation, the last two if it is in place. The operation that reads it saves it
/// too, and each of the two gets a copy of its own back.
const SAVES_RESULT: &[&str] =
    &["ReluBackward", "SigmoidBackward", "TanhBackward", "SoftmaxBackward", "LeakyReluBackward", "EluBackward"];
/// Nodes that save what their operation reads.
const SAVES_INPUT: &[&str] = &[
    "AddmmBackward",
    "MmBackward",
    "LinearBackward",
    "ConvolutionBackward",
    "BmmBackward",
    "MaxPool2DWithIndicesBackward",
    "MulBackward",
];

/// The events, as indices, of the node that reads the result which the node with `first` as its first event saves. It
/// runs right before, and frees nothing that the forward pass allocated: the other node still has it.
fn reader(recorded: &Recorded<'_>, first: usize) -> Option<(usize, usize)> {
    let is_one_of = |index: usize, names: &[&str]| {
        let context = recorded.definitions.contexts.get(recorded.events[index].context.index());
        context.is_some_and(|context| names.iter().any(|name| context.node.starts_with(name)))
    };
    let before = first.checked_sub(1)?;
    let (from, to) = node(recorded, before);
    let frees_saved = || {
        let mut freed = recorded.events[from..=to].iter().filter(|event| !event.allocates);
        freed.any(|event| recorded.blocks[event.block as usize].start.phase == Phase::Forward)
    };
    (is_one_of(first, SAVES_RESULT) && is_one_of(before, SAVES_INPUT) && !frees_saved()).then_some((from, to))
}

/// Whether only a node of the backward pass needs the block after the forward pass.
fn is_saved(recorded: &Recorded<'_>, block: &BlockLifetime) -> bool {
    let is_computed = matches!(block.category, Category::Activation | Category::Temporary | Category::AutocastCache);
    block.start.phase == Phase::Forward && is_computed && recorded.is_freed_by_node(block)
}

/// The events of a node around one of them, as indices: first and last.
fn node(recorded: &Recorded<'_>, index: usize) -> (usize, usize) {
    let context = recorded.events[index].context;
    let is_other = |event: &BlockEvent| event.context != context;
    let first = recorded.events[..index].iter().rposition(is_other).map_or(0, |other| other + 1);
    let last = recorded.events[index..].iter().position(is_other).map_or(recorded.events.len(), |other| index + other);
    (first, last - 1)
}

/// Moves what the forward passes save to the host. `recomputed` are the gradients of weights that checkpointed code
/// computes. Tensors that the backward pass computes again for them are saved on the device.
fn offload(facts: &Facts<'_>, recomputed: &HashSet<u32>, spans: &mut Vec<Span>) {
    let recorded = &facts.recorded;
    let mut reads: Vec<Option<Key>> = vec![None; recorded.blocks.len()];
    for call in &facts.outermost {
        for (index, read) in call.blocks.iter().zip(read_until(recorded, call)) {
            reads[*index as usize] = Some(read);
        }
    }
    for (index, block) in recorded.blocks.iter().enumerate() {
        if is_saved(recorded, block) && spans[index].exists() {
            // Code outside modules reads what it computed with its next operation.
            let next = recorded.blocks.get(index + 1).map_or(Key::MAX, |next| after(next.allocated));
            let freed = recorded.events.partition_point(|event| event.seq < block.freed);
            let first = node(recorded, freed).0;
            let begins = before(recorded.events[first].seq, 0);
            if let Some((from, to)) = reader(recorded, first) {
                let start = before(recorded.events[from].seq, 0);
                let end = after(recorded.events[to].seq);
                spans.push(Span { start: start.max(spans[index].start), end, ..spans[index] });
            }
            let (start, end) = (begins.max(spans[index].start), spans[index].end.min(unpacked_until(recorded, block)));
            let back = Span { start, end: end.max(start), ..spans[index] };
            spans[index].end_by(reads[index].unwrap_or(next));
            if spans[index].end < back.start && back.exists() {
                spans.push(back);
            } else {
                spans[index].last_until(back.end);
            }
        }
    }
    copy_weights(recorded, recomputed, spans);
}

/// Adds the copies of weights, which exist while a node computes the gradient of its weight.
fn copy_weights(recorded: &Recorded<'_>, recomputed: &HashSet<u32>, spans: &mut Vec<Span>) {
    for (index, event) in recorded.events.iter().enumerate().filter(|(_, event)| event.allocates) {
        let block = &recorded.blocks[event.block as usize];
        let name = recorded.definitions.contexts.get(event.context.index()).map_or("", |context| &*context.node);
        if block.start.phase == Phase::Backward
            && !recomputed.contains(&event.block)
            && recorded.is_weight_size(block.requested())
            && WITH_WEIGHT.iter().any(|with| name.starts_with(with))
        {
            let (first, last) = node(recorded, index);
            let copy = Span {
                start: before(recorded.events[first].seq, 1),
                end: after(recorded.events[last].seq),
                ..spans[event.block as usize]
            };
            spans.push(copy);
        }
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::suggestions::test_program::{
        FIRST, INNER_LINES, LEAKY, NET, NET_LINES, NODE_OF_FIRST, NODE_OF_SECOND, Program, SECOND,
    };

    #[test]
    fn offloaded_tensors_come_back_for_the_node_that_needs_them() {
        let mut program = Program::default();
        let mut allocated = Vec::new();
        for (context, stack) in
            [(FIRST, INNER_LINES[0]), (NET, NET_LINES[0]), (SECOND, INNER_LINES[0]), (NET, NET_LINES[0])]
        {
            let block = program.activation(100, context);
            program.blocks[block].start.stack = stack;
            allocated.push(block);
        }
        program.passes = 1;
        for (blocks, node) in [([3, 2], NODE_OF_SECOND), ([1, 0], NODE_OF_FIRST)] {
            let gradient = program.alloc(20, Phase::Backward, Category::AutogradDetail, node);
            for block in blocks {
                program.free(allocated[block], node);
            }
            program.free(gradient, ContextId::NONE);
        }
        assert_eq!(program.peak(), 420);
        // In the forward pass one operation's argument and result, in the backward pass what one node saved.
        assert_eq!(program.peak_with(find), 220);
    }

    #[test]
    fn a_result_that_two_nodes_save_comes_back_for_each() {
        for (is_in_place, expected) in [(true, 100 + 60), (false, 100 + 100)] {
            let mut program = Program::default();
            let argument = program.activation(100, FIRST);
            let result = if is_in_place { argument } else { program.activation(100, FIRST) };
            program.passes = 1;
            let temporary = program.alloc(60, Phase::Backward, Category::Temporary, NODE_OF_SECOND);
            program.free(temporary, NODE_OF_SECOND);
            if !is_in_place {
                program.free(result, NODE_OF_SECOND);
            }
            let gradient = program.alloc(20, Phase::Backward, Category::AutogradDetail, LEAKY);
            program.free(argument, LEAKY);
            program.free(gradient, LEAKY);
            assert_eq!(program.peak_with(find), expected, "in place: {is_in_place}");
        }
    }
}
