//! Saved tensors in host memory, as `torch.autograd.graph.save_on_cpu()` keeps them.
//!
//! What a forward pass saves is copied to the host at once, so the forward pass keeps no more than one without gradients
//! ([`super::reads`]). Each node of the backward pass copies what it needs back when it begins, the weights of linear
//! layers and convolutions too, which are saved tensors like others.

use std::collections::HashSet;

use super::calls::Call;
use super::evaluation::outermost_calls;
use super::reads::read_until;
use super::recorded::{BlockEvent, Recorded};
use super::span::{Key, Span, after, before};
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;

/// The nodes that save a weight.
const WITH_WEIGHT: &[&str] = &["AddmmBackward", "MmBackward", "LinearBackward", "ConvolutionBackward"];

/// Whether only a node of the backward pass needs the block after the forward pass.
fn is_saved(recorded: &Recorded<'_>, block: &BlockLifetime) -> bool {
    let is_computed = matches!(block.category, Category::Activation | Category::Temporary | Category::AutocastCache);
    block.phase == Phase::Forward && is_computed && recorded.is_freed_by_node(block)
}

/// The events of a node around one of them, as indices: first and last.
fn node(recorded: &Recorded<'_>, index: usize) -> (usize, usize) {
    let context = recorded.events[index].context;
    let is_other = |event: &BlockEvent| event.context != context;
    let first = recorded.events[..index].iter().rposition(is_other).map_or(0, |other| other + 1);
    let last = recorded.events[index..].iter().position(is_other).map_or(recorded.events.len(), |other| index + other);
    (first, last - 1)
}

/// Moves what the forward passes save to the host. `recomputed`: the gradients of weights that checkpointed code computes.
/// What the backward pass computes again for them is saved on the device.
pub(super) fn offload(recorded: &Recorded<'_>, recomputed: &HashSet<u32>, spans: &mut Vec<Span>) {
    let mut reads: Vec<Option<Key>> = vec![None; recorded.blocks.len()];
    let calls: Vec<Call> = outermost_calls(recorded);
    for call in &calls {
        for (index, read) in call.blocks.iter().zip(read_until(recorded, call)) {
            reads[*index as usize] = Some(read);
        }
    }
    for (index, block) in recorded.blocks.iter().enumerate() {
        if is_saved(recorded, block) && spans[index].exists() {
            // Code outside modules reads what it computed with its next operation.
            let next = recorded.blocks.get(index + 1).map_or(Key::MAX, |next| after(next.allocated));
            let freed = recorded.events.partition_point(|event| event.seq < block.freed);
            let begins = before(recorded.events[node(recorded, freed).0].seq, 0);
            let back = Span { start: begins.max(spans[index].start), ..spans[index] };
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
        if block.phase == Phase::Backward
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
