//! Forward passes of several micro-batches that run before the backward pass of the first one, so that the activations
//! of all exist at once: GPipe's schedule, or one backward pass of the sum of their losses.

use std::ops::Range;

use super::Recorded;
use super::calls::Call;
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime};
use crate::passes::phase::Phase;

/// A micro-batch of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MicroBatch {
    /// The indices of the events of its forward pass and its loss.
    pub(crate) forward: Range<usize>,
    /// The events between which autograd frees what it has saved.
    pub(crate) backward: Range<usize>,
}

/// The micro-batches of each step whose forward passes all run before the first backward pass, in the order of their
/// backward passes. `calls`: the outermost calls of modules.
///
/// The calls of a step are micro-batches if they call one module, the same code follows each of them (its loss), and
/// autograd frees what one of them saved before it frees anything of the next. Two inputs of one loss, as those of a
/// contrastive one, are none: no code follows the first.
pub(crate) fn gathered_micro_batches(recorded: &Recorded<'_>, calls: &[Call]) -> Vec<Vec<MicroBatch>> {
    let block = |call: &Call| &recorded.blocks[call.blocks[0] as usize];
    let in_step = |call: &&Call| block(call).start.step != BEFORE_STEPS && block(call).start.phase == Phase::Forward;
    let calls: Vec<&Call> = calls.iter().filter(in_step).collect();
    let of_step = |a: &&Call, b: &&Call| block(a).start.step == block(b).start.step;
    calls.chunk_by(of_step).filter_map(|calls| of_step_calls(recorded, calls)).collect()
}

fn of_step_calls(recorded: &Recorded<'_>, calls: &[&Call]) -> Option<Vec<MicroBatch>> {
    let [first, .., last] = calls else { return None };
    if calls.iter().any(|call| call.member != first.member) {
        return None;
    }
    let is_backward = |index: &usize| {
        let event = &recorded.events[*index];
        let block = &recorded.blocks[event.block as usize];
        event.allocates && block.start.phase == Phase::Backward || recorded.contexts().is_node(event.context)
    };
    let backward = (first.events.start..recorded.events.len()).find(is_backward)?;
    if backward < last.events.end {
        return None;
    }
    let mut starts: Vec<usize> = calls.iter().map(|call| begin(recorded, call.events.start)).collect();
    starts.push(backward);
    let losses: Vec<Vec<_>> = calls
        .iter()
        .zip(&starts[1..])
        .map(|(call, next)| allocated(recorded, call.events.end..*next).map(|block| block.start.stack).collect())
        .collect();
    if losses[0].is_empty() || losses.iter().any(|loss| loss != &losses[0]) {
        return None;
    }
    let mut found = Vec::new();
    for forward in starts.windows(2).map(|pair| pair[0]..pair[1]) {
        let saved = allocated(recorded, forward.clone()).filter(|block| recorded.is_freed_by_node(block));
        let (begin, end) =
            saved.fold((u32::MAX, 0), |(begin, end), block| (begin.min(block.freed), end.max(block.freed)));
        let event = |seq: u32| recorded.events.partition_point(|event| event.seq < seq);
        if begin > end {
            return None;
        }
        found.push(MicroBatch { forward, backward: event(begin)..event(end) + 1 });
    }
    found.sort_by_key(|micro_batch| micro_batch.backward.start);
    let is_in_turn = found.windows(2).all(|pair| pair[0].backward.end <= pair[1].backward.start);
    is_in_turn.then_some(found)
}

fn is_input(block: &BlockLifetime) -> bool {
    block.category == Category::Input || block.start.phase == Phase::Data
}

/// What the events allocate, without inputs.
fn allocated<'a>(recorded: &'a Recorded<'_>, events: Range<usize>) -> impl Iterator<Item = &'a BlockLifetime> {
    let allocations = recorded.events[events].iter().filter(|event| event.allocates);
    allocations.map(|event| &recorded.blocks[event.block as usize]).filter(|block| !is_input(block))
}

/// The first event of the inputs before a call that begins with the event `call`.
fn begin(recorded: &Recorded<'_>, call: usize) -> usize {
    let is_of_input = |index: &usize| {
        let event = &recorded.events[*index];
        event.allocates && is_input(&recorded.blocks[event.block as usize])
    };
    (0..call).rev().take_while(is_of_input).last().unwrap_or(call)
}
