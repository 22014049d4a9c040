//! Changes of the optimizer, and of when gradients are freed.

use super::batch::passing_end;
use super::recorded::Recorded;
use super::span::{Key, Span, after, at};
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime, NEVER};
use crate::passes::phase::Phase;
use crate::rules::OptimizerRule;

/// Optimizers with `fused=True` on a GPU.
const FUSED: [&str; 3] = ["Adam", "AdamW", "SGD"];
/// Optimizers with a variant that keeps 8-bit state, in bitsandbytes.
const EIGHT_BIT: [&str; 6] = ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Lion"];
/// State of fewer bytes keeps its data type: bitsandbytes leaves tensors of fewer than 4096 elements alone.
const SMALLEST_EIGHT_BIT: u64 = 4096 * 4;
/// The bytes of float32 state that share one float32 scale in 8-bit state.
const SCALED_TOGETHER: u64 = 256 * 4;

fn in_step(recorded: &Recorded<'_>, block: &BlockLifetime) -> bool {
    block.phase == Phase::Optimizer
        && block.category == Category::Temporary
        && recorded.table.facts(block.stack).optimizer.is_some()
}

/// The optimizer that most state or temporaries belong to; `None` without optimizers, or with several.
pub(super) fn optimizer(recorded: &Recorded<'_>) -> Option<&'static OptimizerRule> {
    let is_used = |b: &&BlockLifetime| b.phase == Phase::Optimizer;
    let mut all = recorded.blocks.iter().filter(is_used).filter_map(|b| recorded.table.facts(b.stack).optimizer);
    let first = all.next()?;
    all.all(|other| other.name == first.name).then_some(first)
}

/// Whether all classes that a name lists (`Adam or AdamW`) are in `known`. Classes of other libraries can share the code
/// of PyTorch's without their options.
fn are_all(name: &str, known: &[&str]) -> bool {
    name.split(" or ").all(|class| known.contains(&class))
}

/// Whether the optimizer with this name can run fused.
pub(super) fn can_fuse(name: &str) -> bool {
    are_all(name, &FUSED)
}

/// Whether the optimizer with this name has an 8-bit variant.
pub(super) fn has_eight_bit(name: &str) -> bool {
    are_all(name, &EIGHT_BIT)
}

/// Whether the optimizer with this name is the class of the rule itself, which has `foreach=False`.
pub(super) fn is_own_class(optimizer: &OptimizerRule, name: &str) -> bool {
    are_all(name, &[optimizer.name])
}

/// Removes the temporaries of the optimizer's step.
pub(super) fn fuse(recorded: &Recorded<'_>, spans: &mut [Span]) {
    for span in spans.iter_mut() {
        if in_step(recorded, &recorded.blocks[span.block as usize]) {
            span.vanish();
        }
    }
}

/// Processes one parameter after the other: `per_parameter` temporaries of the largest parameter at a time.
pub(super) fn one_by_one(recorded: &Recorded<'_>, per_parameter: u64, spans: &mut Vec<Span>) {
    let mut steps: Vec<(u32, Span)> = Vec::new();
    for span in spans.iter_mut() {
        let block = &recorded.blocks[span.block as usize];
        if !span.exists() || !in_step(recorded, block) {
            continue;
        }
        match steps.last_mut() {
            Some((step, all)) if *step == block.step => {
                all.requested = all.requested.max(span.requested);
                all.end = all.end.max(span.end);
            }
            _ => steps.push((block.step, *span)),
        }
        span.vanish();
    }
    for (_, largest) in steps {
        spans.extend((0..per_parameter).map(|_| largest));
    }
}

/// Keeps state in 8 bits, with a scale for each group of values. Its kernels need no temporaries.
pub(super) fn eight_bit(recorded: &Recorded<'_>, spans: &mut [Span]) {
    for span in spans.iter_mut() {
        let block = &recorded.blocks[span.block as usize];
        if block.category == Category::OptimizerState && span.requested >= SMALLEST_EIGHT_BIT {
            span.requested = span.requested / 4 + span.requested.div_ceil(SCALED_TOGETHER) * 4;
        }
    }
    fuse(recorded, spans);
}

/// Steps the optimizer for each parameter as soon as its gradient is complete, and frees the gradient. If the step needs
/// temporaries, the step for one parameter needs one of the parameter's size.
pub(super) fn step_in_backward(recorded: &Recorded<'_>, spans: &mut Vec<Span>) {
    let has_temporaries = recorded.blocks.iter().any(|block| in_step(recorded, block));
    let mut added = Vec::new();
    for span in spans.iter_mut() {
        let block = &recorded.blocks[span.block as usize];
        if block.category == Category::Gradient && block.phase == Phase::Backward && span.exists() {
            span.end_by(passing_end(recorded, block));
            if has_temporaries {
                let start = span.end.saturating_sub(2).max(span.start);
                added.push(Span { start, ..*span });
            }
        }
    }
    spans.extend(added);
    fuse(recorded, spans);
}

/// Whether the block exists only because parameters are trained: a gradient, optimizer state, or a temporary for them.
fn is_for_training(recorded: &Recorded<'_>, block: &BlockLifetime) -> bool {
    match block.category {
        Category::Gradient => !recorded.is_freed_by_node(block),
        Category::OptimizerState | Category::CommunicationBucket => true,
        Category::Temporary if block.phase == Phase::Optimizer => true,
        _ => recorded.is_passing_weight_gradient(block),
    }
}

/// Gradients of other parameters than those of linear layers and embeddings are at most one in this many parts of all, where
/// adapters are computed.
const OTHER_GRADIENTS: u64 = 20;
/// The nodes that compute gradients of linear layers and embeddings.
const ADAPTABLE: &[&str] = &["AddmmBackward", "MmBackward", "LinearBackward", "EmbeddingBackward"];

/// Whether nearly all gradients are those of linear layers and embeddings. With adapters beside all linear layers, the
/// backward pass needs the same activations. Where other layers hold the parameters, it needs fewer.
pub(super) fn is_adaptable(recorded: &Recorded<'_>) -> bool {
    let (mut adaptable, mut all) = (0, 0);
    for block in recorded.blocks.iter().filter(|block| block.phase == Phase::Backward) {
        if block.category == Category::Gradient || recorded.is_passing_weight_gradient(block) {
            let node = recorded.definitions.contexts.get(block.context.index()).map_or("", |node| &*node.node);
            all += block.size();
            adaptable += if ADAPTABLE.iter().any(|known| node.starts_with(known)) { block.size() } else { 0 };
        }
    }
    all - adaptable <= all / OTHER_GRADIENTS
}

/// Leaves out what the training of parameters needs.
pub(super) fn freeze(recorded: &Recorded<'_>, spans: &mut [Span]) {
    for span in spans.iter_mut() {
        if is_for_training(recorded, &recorded.blocks[span.block as usize]) {
            span.vanish();
        }
    }
}

/// The bytes that the training of parameters needs at the event `seq`, and those with the parameters.
pub(super) fn trained_bytes(recorded: &Recorded<'_>, seq: u32) -> (u64, u64) {
    let at_peak = || recorded.blocks.iter().filter(|block| block.includes(seq));
    let training = at_peak().filter(|block| is_for_training(recorded, block)).map(|block| block.size()).sum();
    let parameters = at_peak().filter(|block| block.category == Category::Parameter).map(|block| block.size());
    (training, training + parameters.sum::<u64>())
}

/// Whether the program works on all gradients together before the step, such as clipping their norm.
pub(super) fn works_on_gradients(recorded: &Recorded<'_>) -> bool {
    let is_work = |b: &BlockLifetime| {
        b.phase == Phase::Optimizer
            && recorded.table.facts(b.stack).rule.is_some_and(|r| r.meaning == crate::rules::Meaning::GradientWork)
    };
    recorded.blocks.iter().any(is_work)
}

/// Frees gradients right after the optimizer's step. Gradients that exist already when a backward pass begins are then
/// allocated by that pass.
pub(super) fn clear_gradients(recorded: &Recorded<'_>, spans: &mut [Span]) {
    // By step: the last event of its optimizer.
    let mut ends: Vec<(u32, u32)> = Vec::new();
    for event in &recorded.events {
        let block = &recorded.blocks[event.block as usize];
        if event.allocates && block.phase == Phase::Optimizer && block.step != BEFORE_STEPS {
            match ends.last_mut() {
                Some((step, last)) if *step == block.step => *last = event.seq,
                _ => ends.push((block.step, event.seq)),
            }
        }
    }
    let end_of = |step: u32| {
        let found = ends.binary_search_by_key(&step, |(step, _)| *step).ok()?;
        Some(after(ends[found].1))
    };
    let mut lasting = Vec::new();
    for (index, span) in spans.iter_mut().enumerate() {
        let block = &recorded.blocks[index.min(recorded.blocks.len() - 1)];
        if block.category != Category::Gradient || block.step == BEFORE_STEPS || !span.exists() {
            continue;
        }
        if let Some(end) = end_of(block.step).filter(|end| *end > span.start && *end < span.end) {
            if block.freed == NEVER || span.end > end_of(block.step + 1).unwrap_or(Key::MAX) {
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
            span.last_until(end_of(block.step).unwrap_or(at(block.allocated)));
        }
    }
}

/// Makes gradients views of DistributedDataParallel's buckets. A node still allocates a gradient, which is then copied
/// into the bucket. Gradients that no node allocates are views already.
pub(super) fn gradients_in_buckets(recorded: &Recorded<'_>, spans: &mut [Span]) {
    for span in spans.iter_mut() {
        let block = &recorded.blocks[span.block as usize];
        if block.category == Category::Gradient && recorded.contexts().is_node(block.context) {
            span.end_by(passing_end(recorded, block).max(span.start + 1));
        }
    }
}
