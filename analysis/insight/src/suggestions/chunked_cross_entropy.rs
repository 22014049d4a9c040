//! The loss of a language model in chunks of tokens: the output layer and the cross-entropy of one chunk at a time,
//! each chunk checkpointed.
//!
//! The blocks with one number per token and word of the vocabulary are the logits, their copies in other data types,
//! their softmax, and the gradients of these. With chunks they are smaller, and the gradient of the output layer's
//! weight is added up chunk by chunk: the sum exists while the next chunk's logits do, and with each chunk's own
//! gradient it makes a new sum.

use std::collections::{HashMap, HashSet};

use memtrace_trace::file::{Frame, StackNode};
use memtrace_trace::ids::{ContextId, StackId};

use super::change::{Change, ChangedBlocks, Cost, FORWARD_ONLY, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::span::{Key, Span, at};
use crate::passes::category::Category;
use crate::passes::lifetimes::{BlockLifetime, LifetimeStart};
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::ChunkedCrossEntropy,
    action: "the loss at {place} in 8 chunks of tokens, each with its logits and checkpointed",
    condition: "The softmax of a cross-entropy or of log probabilities is at least a twentieth of the peak.",
    method: "Blocks of the logits' size are an eighth as large. The sum of the output layer's gradients exists \
             from the first chunk on, and a new sum when a chunk's gradient is added.",
    cost: Cost::Twice,
    code: &[
        "# at {place}; hidden: [tokens, width], labels: [tokens]",
        "def part(hidden, labels):",
        r#"    return F.cross_entropy(head(hidden).float(), labels, reduction="sum")"#,
        "parts = zip(hidden.chunk(8), labels.chunk(8))",
        "loss = sum(checkpoint(part, *one, use_reentrant=False) for one in parts) / len(labels)",
    ],
    link: "https://docs.pytorch.org/docs/stable/checkpoint.html",
    at_most: false,
    programs: &["vocabulary", "factored", "policy"],
    find,
};

/// The number of chunks.
const CHUNKS: u64 = 8;
/// The logits are worth a change if one of them is at least 5 % (1/20) of the peak.
const WORTH_CHANGING: u64 = 20;
/// The nodes of the methods of a tensor that compute a loss.
const LOSS_NODES: &[&str] = &["LogSoftmaxBackward0", "LogsumexpBackward0"];
/// The sizes of logits differ by at most 6.25 % (1/16), because the last token has no target.
const SHIFTED_PART: u64 = 16;
/// The number of blocks before and after the loss, and at the start of its backward pass, that can be logits.
const NEAR_BLOCKS: usize = 64;
/// The gradient of the weight follows the last gradient of logits within this many events.
const NEAR_EVENTS: usize = 16;

/// The blocks with one number per token and word.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct ChunkedCrossEntropy {
    /// Their indices, in order.
    blocks: Vec<u32>,
    /// The indices of what the nodes that read their gradients allocate for themselves.
    temporaries: Vec<u32>,
    /// The stack of the largest one that the loss itself allocates.
    loss: StackId,
    /// Whether passes without gradients compute the same.
    is_in_evaluation: bool,
}

impl ChunkedCrossEntropy {
    /// Finds the logits; `None` if there are none of importance beside a peak of `peak` bytes.
    fn of(recorded: &Recorded<'_>, peak: u64) -> Option<ChunkedCrossEntropy> {
        let stacks = loss_stacks(recorded);
        let in_loss = |b: &&BlockLifetime| match b.start.phase {
            Phase::Forward => stacks.contains_key(&b.start.stack),
            // One line computes it with gradients and without.
            phase => phase.is_forward_only() && stacks.get(&b.start.stack) == Some(&LossCode::Program),
        };
        let largest = recorded.blocks.iter().filter(in_loss).max_by_key(|block| block.requested())?;
        let size = largest.requested();
        if size < peak / WORTH_CHANGING {
            return None;
        }
        let is_like = |requested: u64, like: u64| requested.abs_diff(like) <= like / SHIFTED_PART;
        let is_logits = |block: &BlockLifetime| {
            matches!(block.category, Category::Activation | Category::Temporary | Category::AutogradDetail)
                && [size, size / 2, size * 2].iter().any(|like| is_like(block.requested(), *like))
        };
        // Other blocks can have these sizes by chance, so only those near the loss and the start of its backward pass
        // count, and of these those of the modules that compute logits and loss.
        let homes = homes(recorded, in_loss, is_logits);
        let is_logits = |block: &BlockLifetime| is_logits(block) && homes.contains(&home(recorded, &block.start));
        let is_temporary = |block: &BlockLifetime| {
            block.category == Category::Temporary
                && !recorded.is_weight_size(block.requested())
                && homes.contains(&home(recorded, &block.start))
        };
        let (mut found, mut temporaries) = (Vec::new(), Vec::new());
        let (mut forward, mut backward) = (0..0, 0..0);
        for (index, block) in recorded.blocks.iter().enumerate() {
            if in_loss(&block) && is_logits(block) {
                forward = index.saturating_sub(NEAR_BLOCKS)..index + NEAR_BLOCKS;
                let begins = recorded.blocks[index..].iter().position(|block| block.start.phase == Phase::Backward);
                backward = begins.map_or(0..0, |begins| index + begins..index + begins + NEAR_BLOCKS);
                // Those before the loss.
                let before = (forward.start..index).filter(|before| {
                    is_forward(recorded.blocks[*before].start.phase) && is_logits(&recorded.blocks[*before])
                });
                found.extend(before.map(|index| index as u32));
            }
            let is_near = match block.start.phase {
                phase if is_forward(phase) => forward.contains(&index),
                Phase::Backward => backward.contains(&index),
                _ => false,
            };
            if is_near && is_logits(block) {
                found.push(index as u32);
            } else if block.start.phase == Phase::Backward && is_near && is_temporary(block) {
                temporaries.push(index as u32);
            }
        }
        found.sort_unstable();
        found.dedup();
        let phase = |index: &u32| recorded.blocks[*index as usize].start.phase;
        let is_in_evaluation = found.iter().any(|index| phase(index).is_forward_only());
        Some(ChunkedCrossEntropy { blocks: found, temporaries, loss: largest.start.stack, is_in_evaluation })
    }

    /// The blocks of each backward pass, which has a gradient of the weight.
    fn backward_passes<'a>(&'a self, recorded: &'a Recorded<'_>) -> impl Iterator<Item = &'a [u32]> {
        let of_pass = |a: &u32, b: &u32| {
            let pass = |index: u32| {
                let block = &recorded.blocks[index as usize];
                (block.start.phase == Phase::Backward, block.start.backward_passes)
            };
            pass(*a) == pass(*b)
        };
        let is_backward = |pass: &&[u32]| recorded.blocks[pass[0] as usize].start.phase == Phase::Backward;
        self.blocks.chunk_by(of_pass).filter(is_backward)
    }
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    Some(Box::new(ChunkedCrossEntropy::of(&facts.recorded, facts.peak)?))
}

impl Change for ChunkedCrossEntropy {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Operations
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        for index in self.blocks.iter().chain(&self.temporaries) {
            let span = &mut blocks.spans[*index as usize];
            span.requested = span.requested.div_ceil(CHUNKS);
        }
        // A variable keeps logits that no node needs until the backward pass is over. Those of a chunk end with the
        // function that computes its loss.
        let recorded = &facts.recorded;
        let mut backward = recorded.blocks.iter().filter(|block| block.start.phase == Phase::Backward).peekable();
        for index in &self.blocks {
            let block = &recorded.blocks[*index as usize];
            while backward.next_if(|next| next.allocated < block.allocated).is_some() {}
            let begins = backward.peek().filter(|_| block.start.phase == Phase::Forward);
            if let Some(begins) = begins.filter(|_| !recorded.is_freed_by_node(block)) {
                blocks.spans[*index as usize].end_by(at(begins.allocated));
            }
        }
        for pass in self.backward_passes(&facts.recorded) {
            add_weight_gradients(&facts.recorded, pass, blocks);
        }
    }

    fn phases(&self) -> &'static [Phase] {
        if self.is_in_evaluation { FORWARD_ONLY } else { &[] }
    }

    fn values(&self, _facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        vec![("place", Value::Line(self.loss))]
    }
}

/// The gradient of the output layer's weight that follows the gradients of the logits `pass`.
fn weight_gradient(recorded: &Recorded<'_>, pass: &[u32]) -> Option<u32> {
    let last = recorded.blocks[pass[pass.len() - 1] as usize].allocated;
    let later = recorded.events[recorded.first_event_after(last)..].iter().take(NEAR_EVENTS);
    let mut allocated = later.filter(|event| event.allocates).map(|event| event.block);
    let sizes: HashSet<u64> =
        recorded.blocks.iter().filter(|b| b.category == Category::Parameter).map(|b| b.requested()).collect();
    allocated.find(|index| {
        let block = &recorded.blocks[*index as usize];
        sizes.contains(&block.requested()) && block.size() >= recorded.blocks[pass[0] as usize].size() / 64
    })
}

/// Adds up the gradient of the output layer's weight. The backward passes of the chunks are checkpointed.
fn add_weight_gradients(recorded: &Recorded<'_>, pass: &[u32], blocks: &mut ChangedBlocks) {
    let first = recorded.blocks[pass[0] as usize].allocated;
    let Some(weight) = weight_gradient(recorded, pass) else { return };
    blocks.recomputed.insert(weight);
    let spans = &mut blocks.spans;
    let until: Key = pass.iter().map(|index| spans[*index as usize].end).max().unwrap_or(0);
    // From the second chunk on the sum exists, and beside it the chunk's own gradient. Adding them makes a new sum when
    // the logits are freed.
    let gradient = &mut spans[weight as usize];
    let own = Span { end: until.max(gradient.start) + 2, ..*gradient };
    let new_sum = Span { start: own.end - 1, end: own.end, ..*gradient };
    gradient.start = gradient.start.min(at(first));
    spans.extend([own, new_sum]);
}

fn is_forward(phase: Phase) -> bool {
    phase == Phase::Forward || phase.is_forward_only()
}

/// The call of a module to which a block belongs.
fn home(recorded: &Recorded<'_>, start: &LifetimeStart) -> ContextId {
    recorded.contexts().module(start.context)
}

/// The calls that compute logits and loss: that of the loss, those around it, and the last other one before it if it
/// allocates logits. `NONE` stands for code outside modules.
fn homes(
    recorded: &Recorded<'_>,
    in_loss: impl Fn(&&BlockLifetime) -> bool,
    is_logits: impl Fn(&BlockLifetime) -> bool,
) -> HashSet<ContextId> {
    let calls = &recorded.definitions.nn_calls;
    let mut homes = HashSet::from([ContextId::NONE]);
    for (index, block) in recorded.blocks.iter().enumerate().filter(|(_, block)| in_loss(block)) {
        let mut around = home(recorded, &block.start);
        while homes.insert(around) {
            around = calls.get(&around).map_or(ContextId::NONE, |call| call.caller);
        }
        let before = recorded.blocks[index.saturating_sub(NEAR_BLOCKS)..index].iter().rev();
        let mut others =
            before.filter(|b| is_forward(b.start.phase) && !homes.contains(&home(recorded, &b.start))).peekable();
        let last = others.peek().map(|block| home(recorded, &block.start));
        let mut of_last = others.take_while(|block| Some(home(recorded, &block.start)) == last);
        if let Some(last) = last.filter(|_| of_last.any(&is_logits)) {
            homes.insert(last);
        }
    }
    homes
}

/// Whose code a stack of a loss ends in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LossCode {
    /// A function of PyTorch, which any code can call.
    PyTorch,
    /// A line of the program that calls a method of a tensor. Autograd knows it by its node.
    Program,
}

/// The stacks of a loss with one class per word.
fn loss_stacks(recorded: &Recorded<'_>) -> HashMap<StackId, LossCode> {
    let is_loss = |frame: &Frame| {
        !frame.native
            && ["cross_entropy", "log_softmax", "nll_loss"].contains(&&*frame.name)
            && frame.filename.ends_with("torch/nn/functional.py")
    };
    let definitions = recorded.definitions;
    let mut frames: Vec<Option<LossCode>> =
        definitions.frames.iter().map(|frame| is_loss(frame).then_some(LossCode::PyTorch)).collect();
    for node in definitions.contexts.iter().filter(|context| LOSS_NODES.contains(&&*context.node)) {
        let frame = definitions.stacks.get(node.forward.index()).map_or(usize::MAX, |stack| stack.frame.index());
        if let Some(code @ None) = frames.get_mut(frame) {
            *code = Some(LossCode::Program);
        }
    }
    let code = |stack: &StackNode| frames.get(stack.frame.index()).copied().flatten();
    let stacks = definitions.stacks.iter().enumerate();
    stacks.filter_map(|(index, stack)| Some((StackId(index as u32), code(stack)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::lifetimes::BEFORE_STEPS;
    use crate::suggestions::test_program::{LOSS, NET, NODE_OF_FIRST, Program};

    #[test]
    fn chunks_of_the_loss_need_the_sum_of_the_weights_gradients() {
        let mut program = Program::default();
        let weight = program.alloc(40, Phase::Load, Category::Parameter, ContextId::NONE);
        program.blocks[weight].start.step = BEFORE_STEPS;
        let logits = program.activation(800, NET);
        let softmax = program.activation(800, NET);
        program.blocks[softmax].start.stack = LOSS;
        program.passes = 1;
        let gradient = program.alloc(800, Phase::Backward, Category::AutogradDetail, ContextId::NONE);
        program.free(softmax, NODE_OF_FIRST);
        program.alloc(40, Phase::Backward, Category::Gradient, NODE_OF_FIRST);
        program.free(gradient, NODE_OF_FIRST);
        program.free(logits, NODE_OF_FIRST);
        assert_eq!(program.peak(), 40 + 2400);
        assert_eq!(program.peak_with(find), 40 + 300 + 40);
    }
}
