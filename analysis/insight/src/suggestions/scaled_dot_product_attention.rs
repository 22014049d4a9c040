//! Attention without its score matrices: `torch.nn.functional.scaled_dot_product_attention` instead of
//! softmax(QK^T)V.
//!
//! The score matrices are the blocks that the call of one module allocates with the size of a softmax's result, in any
//! data type, on the way from queries and keys to the result, and the autograd temporaries of these sizes in its
//! backward pass. The fused kernels allocate none of them. They keep one number per row for the backward pass.
//!
//! Without a backward pass no node shows a softmax. Then a module whose class is named after attention shows them: it
//! allocates several blocks of one size that is clearly larger than all results of the modules that it calls, which are
//! queries, keys and values.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use memtrace_trace::ids::{ContextId, StackId};

use super::change::{Change, ChangedBlocks, Cost, FORWARD_ONLY, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::Recorded;
use crate::passes::category::Category;
use crate::passes::lifetimes::{BlockLifetime, NEVER};
use crate::passes::phase::Phase;
use crate::rules::{RuleId, is_attention};

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::ScaledDotProductAttention,
    action: "F.scaled_dot_product_attention instead of softmax(QK^T)V at {place}",
    condition: "In the call of a module that computes attention, a softmax and at least one other block of its size \
                are allocated. The softmax follows a product of matrices of its size, or its code is named after \
                attention. The program does not keep them, and the module looks up no bias in an embedding.",
    method: "The blocks of the score matrix's size vanish from the call and from its backward pass, in all data \
             types.",
    cost: Cost::Free,
    code: &[
        "# at {place}, instead of softmax(q @ k.transpose(-2, -1) * scale) @ v",
        "out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # or is_causal=True",
    ],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
    at_most: false,
    programs: &["decoder", "inference"],
    find,
};

/// Attention has at least this many score matrices in a forward pass: QK^T and its softmax.
const SCORES: u32 = 2;
/// Score matrices are larger than queries by at least this ratio, where nothing else shows what they are.
const LARGER: (u64, u64) = (3, 2);
/// Score matrices are worth a change if together they are at least 2 % (1/50) of the peak.
const WORTH_CHANGING: u64 = 50;

/// The modules whose calls compute attention with score matrices, and the sizes of these.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct ScaledDotProductAttention {
    /// The requested size of score matrices in the call with this context.
    sizes: BTreeMap<ContextId, u64>,
    /// The requested sizes of what the modules that such a call calls allocate: queries, keys, values and results.
    projected: BTreeMap<ContextId, BTreeSet<u64>>,
    /// The stack of the first softmax.
    softmax: StackId,
}

/// Whether these are all elements of one matrix in two data types, or in one.
fn same_elements(a: u64, b: u64) -> bool {
    a == b || a == 2 * b || 2 * a == b || a == 4 * b || 4 * a == b
}

impl ScaledDotProductAttention {
    /// Finds the score matrices; `None` if there are none of importance beside a peak of `peak` bytes.
    fn of(recorded: &Recorded<'_>, peak: u64) -> Option<ScaledDotProductAttention> {
        let softmax_stacks = softmax_stacks(recorded);
        let fused = fused(recorded);
        let products = products(recorded);
        let mut found = ScaledDotProductAttention::default();
        // By call: the size of softmax results. One line can compute a softmax and its product with the values, so the
        // largest size counts.
        let mut softmax: BTreeMap<ContextId, u64> = BTreeMap::new();
        let computes = |phase: Phase| phase.is_forward_only() || matches!(phase, Phase::Forward | Phase::Recompute);
        // By call: the sizes of products since the latest backward pass. The softmax of a router is no softmax of a
        // product: what it multiplies comes after it.
        let mut multiplied: BTreeMap<ContextId, BTreeSet<u64>> = BTreeMap::new();
        let mut passes = 0;
        for block in recorded.blocks.iter().filter(|b| computes(b.start.phase)) {
            let call = attention_call(recorded, block.start.context);
            if std::mem::replace(&mut passes, block.start.backward_passes) != block.start.backward_passes {
                multiplied.clear();
            }
            if products.contains(&block.start.stack) {
                multiplied.entry(call).or_default().insert(block.requested());
            }
            if call.is_none() || fused.contains(&call) || !softmax_stacks.contains(&block.start.stack) {
                continue;
            }
            let is_of_product = || {
                let sizes = multiplied.get(&call).into_iter().flatten();
                sizes.into_iter().any(|size| same_elements(*size, block.requested()))
            };
            if !is_of_product() && !has_attention_frame(recorded, block.start.stack) {
                continue;
            }
            let size = softmax.entry(call).or_default();
            *size = block.requested().max(*size);
            if found.softmax.is_none() {
                found.softmax = block.start.stack;
            }
        }
        for (call, size, stack) in by_class(recorded) {
            if fused.contains(&call) || has_fused_frame(recorded, stack) {
                continue;
            }
            softmax.entry(call).or_insert(size);
            if found.softmax.is_none() {
                found.softmax = stack;
            }
        }
        let biased = with_learned_bias(recorded);
        let class = |call: &ContextId| recorded.definitions.nn_calls.get(call).map_or("", |call| &*call.class);
        softmax.retain(|call, _| !biased.contains(class(call)));
        let mut counts: BTreeMap<ContextId, (u32, u64)> = BTreeMap::new();
        for block in recorded.blocks.iter().filter(|block| computes(block.start.phase)) {
            let call = attention_call(recorded, block.start.context);
            if softmax.get(&call) == Some(&block.requested()) {
                let count = counts.entry(call).or_default();
                *count = (count.0 + 1, count.1 + block.size());
            }
        }
        let used = used_elsewhere(recorded, &softmax);
        let mut total = 0;
        for (call, (blocks, bytes)) in counts {
            if let Some(size) = softmax.get(&call).filter(|_| blocks >= SCORES && !used.contains(&call)) {
                total += bytes;
                found.sizes.insert(call, *size);
            }
        }
        for block in recorded.blocks.iter().filter(|block| computes(block.start.phase)) {
            let caller = recorded.definitions.nn_calls.get(&attention_call(recorded, block.start.context));
            if let Some(caller) = caller.map(|call| call.caller).filter(|caller| found.sizes.contains_key(caller)) {
                found.projected.entry(caller).or_default().insert(block.requested());
            }
        }
        (total >= peak / WORTH_CHANGING).then_some(found)
    }
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    Some(Box::new(ScaledDotProductAttention::of(&facts.recorded, facts.peak)?))
}

impl Change for ScaledDotProductAttention {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Operations
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        let recorded = &facts.recorded;
        for span in &mut blocks.spans {
            let block = &recorded.blocks[span.block as usize];
            let call = attention_call(recorded, recorded.contexts().module(block.start.context));
            let Some(size) = self.sizes.get(&call) else { continue };
            let requested = block.requested();
            let is_projected = self.projected.get(&call).is_some_and(|sizes| sizes.contains(&requested));
            if *size == requested || !is_projected && same_elements(*size, requested) {
                span.vanish();
            }
        }
    }

    fn phases(&self) -> &'static [Phase] {
        FORWARD_ONLY
    }

    fn values(&self, _facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        vec![("place", Value::Line(self.softmax))]
    }
}

/// The calls whose score matrices the program keeps: no node frees them, and they are allocated when a backward pass
/// has begun.
fn used_elsewhere(recorded: &Recorded<'_>, softmax: &BTreeMap<ContextId, u64>) -> HashSet<ContextId> {
    let in_backward = |block: &&BlockLifetime| block.start.phase == Phase::Backward;
    let backward: Vec<u32> = recorded.blocks.iter().filter(in_backward).map(|block| block.allocated).collect();
    let is_kept = |block: &BlockLifetime| {
        let next = backward.partition_point(|seq| *seq < block.allocated);
        let is_known = recorded.is_freed(block) || recorded.until == NEVER;
        is_known && !recorded.is_freed_by_node(block) && backward.get(next).is_some_and(|seq| *seq < block.freed)
    };
    let forward = recorded.blocks.iter().filter(|block| block.start.phase == Phase::Forward);
    let scores = forward.map(|block| (attention_call(recorded, block.start.context), block));
    let kept = scores.filter(|(call, block)| softmax.get(call) == Some(&block.requested()) && is_kept(block));
    kept.map(|(call, _)| call).collect()
}

/// The calls of modules named after attention that allocate blocks larger than queries: the call, the size, and the
/// stack of one of them.
fn by_class(recorded: &Recorded<'_>) -> Vec<(ContextId, u64, StackId)> {
    let calls = &recorded.definitions.nn_calls;
    let is_attention = |call: &ContextId| {
        calls.get(call).is_some_and(|call| {
            let class = call.class.to_ascii_lowercase();
            class.contains("attention") || class.contains("attn")
        })
    };
    // By call: its largest own block, and the largest block of the modules that it calls.
    let mut sizes: BTreeMap<ContextId, ((u64, StackId), u64)> = BTreeMap::new();
    let computes = |phase: Phase| phase.is_forward_only() || phase == Phase::Forward;
    let computed = |block: &&BlockLifetime| {
        computes(block.start.phase) && matches!(block.category, Category::Activation | Category::Temporary)
    };
    for block in recorded.blocks.iter().filter(computed) {
        let (call, requested) = (attention_call(recorded, block.start.context), block.requested());
        if is_attention(&call) {
            let own = &mut sizes.entry(call).or_default().0;
            if requested > own.0 {
                *own = (requested, block.start.stack);
            }
        }
        let caller = calls.get(&call).map_or(ContextId::NONE, |call| call.caller);
        if is_attention(&caller) {
            let inside = &mut sizes.entry(caller).or_default().1;
            *inside = requested.max(*inside);
        }
    }
    let is_larger =
        |inside: u64, own: u64| inside > 0 && own.saturating_mul(LARGER.1) >= inside.saturating_mul(LARGER.0);
    let larger = sizes.into_iter().filter(|(_, ((own, _), inside))| is_larger(*inside, *own));
    larger.map(|(call, ((own, stack), _))| (call, own, stack)).collect()
}

/// The call that computes attention around a call of a module for softmax or dropout.
fn attention_call(recorded: &Recorded<'_>, context: ContextId) -> ContextId {
    match recorded.definitions.nn_calls.get(&context) {
        Some(call) if ["Softmax", "Dropout"].contains(&&*call.class) => call.caller,
        Some(_) => context,
        None => ContextId::NONE,
    }
}

/// The stacks that allocate the result of a softmax: by autograd's node, by PyTorch's function, or by the module.
fn softmax_stacks(recorded: &Recorded<'_>) -> HashSet<StackId> {
    let definitions = recorded.definitions;
    let nodes = definitions.contexts.iter().filter(|c| &*c.node == "SoftmaxBackward0" && !c.forward.is_none());
    let mut stacks: HashSet<StackId> = nodes.map(|c| c.forward).collect();
    let is_softmax = |frame: &memtrace_trace::file::Frame| {
        !frame.native && &*frame.name == "softmax" && frame.filename.ends_with("torch/nn/functional.py")
    };
    let frames: Vec<bool> = definitions.frames.iter().map(is_softmax).collect();
    for (index, stack) in definitions.stacks.iter().enumerate() {
        if frames.get(stack.frame.index()).copied().unwrap_or(false) {
            stacks.insert(StackId(index as u32));
        }
    }
    stacks
}

/// The stacks that made an autograd node of a product of matrices.
fn products(recorded: &Recorded<'_>) -> HashSet<StackId> {
    let is_product = |node: &str| node == "BmmBackward0" || node == "BaddbmmBackward0";
    let nodes = recorded.definitions.contexts.iter().filter(|c| is_product(&c.node));
    nodes.map(|c| c.forward).filter(|stack| !stack.is_none()).collect()
}

/// The calls that use `scaled_dot_product_attention` already. Where no fused kernel can serve them, PyTorch allocates
/// score matrices itself (`SafeSoftmaxBackward0`).
fn fused(recorded: &Recorded<'_>) -> HashSet<ContextId> {
    let is_fused = |node: &str| node.starts_with("ScaledDotProduct") || node.starts_with("SafeSoftmax");
    let nodes = recorded.definitions.contexts.iter().filter(|c| is_fused(&c.node));
    nodes.map(|c| attention_call(recorded, c.module)).filter(|call| !call.is_none()).collect()
}

/// The classes whose calls add a learned bias to the scores: they look it up in an embedding. No fused kernel takes the
/// bias as it comes from there, with the heads in its last dimension, and PyTorch computes the score matrices then too.
fn with_learned_bias<'a>(recorded: &Recorded<'a>) -> HashSet<&'a str> {
    let calls = &recorded.definitions.nn_calls;
    let embeddings = calls.values().filter(|call| &*call.class == "Embedding");
    embeddings.filter_map(|call| calls.get(&call.caller)).map(|caller| &*caller.class).collect()
}

/// Whether a function is named after `scaled_dot_product_attention`.
fn has_fused_frame(recorded: &Recorded<'_>, stack: StackId) -> bool {
    let mut frames = recorded.definitions.walk(stack).filter_map(|(_, frame)| frame);
    frames.any(|frame| frame.name.contains("sdpa") || frame.name.contains("scaled_dot_product"))
}

fn has_attention_frame(recorded: &Recorded<'_>, stack: StackId) -> bool {
    recorded.definitions.walk(stack).any(|(_, frame)| frame.is_some_and(is_attention))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suggestions::test_program::{ATTENTION, FIRST, NET, NODE_OF_FIRST, PRODUCT, Program, QUERY, SOFTMAX};

    #[test]
    fn scores_vanish_from_both_passes() {
        let mut program = Program::default();
        let scores = program.activation(80, FIRST);
        program.blocks[scores].start.stack = PRODUCT;
        let softmax = program.activation(80, FIRST);
        program.blocks[softmax].start.stack = SOFTMAX;
        program.free(scores, FIRST);
        let dropped = program.activation(80, FIRST);
        let mask = program.activation(20, FIRST);
        let result = program.activation(8, FIRST);
        program.passes = 1;
        let gradient = program.alloc(80, Phase::Backward, Category::AutogradDetail, NODE_OF_FIRST);
        for block in [gradient, dropped, mask, softmax, result] {
            program.free(block, NODE_OF_FIRST);
        }
        assert_eq!(program.peak(), 80 + 80 + 20 + 8 + 80);
        assert_eq!(program.peak_with(find), 8);
    }

    /// A mixture of experts multiplies with the softmax of its router.
    #[test]
    fn a_softmax_of_no_product_has_no_scores() {
        let mut program = Program::default();
        for pass in 0..2 {
            let gates = program.activation(80, FIRST);
            let softmax = program.activation(80, FIRST);
            program.blocks[softmax].start.stack = SOFTMAX;
            program.free(gates, FIRST);
            let slots = program.activation(80, FIRST);
            program.blocks[slots].start.stack = PRODUCT;
            program.passes = pass + 1;
            for block in [slots, softmax] {
                program.free(block, NODE_OF_FIRST);
            }
        }
        let peak = program.peak();
        assert_eq!(program.peak_with(find), peak);
    }

    #[test]
    fn scores_are_found_without_a_backward_pass() {
        let mut program = Program::default();
        let query = program.activation(20, QUERY);
        let scores = program.activation(80, ATTENTION);
        let softmax = program.activation(80, ATTENTION);
        program.free(scores, ATTENTION);
        let result = program.activation(20, ATTENTION);
        for block in [query, softmax, result] {
            program.free(block, NET);
        }
        assert_eq!(program.peak(), 180);
        assert_eq!(program.peak_with(find), 40);
    }
}
