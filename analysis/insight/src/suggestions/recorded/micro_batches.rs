//! Forward passes of several micro-batches that run before the backward pass of the first one, so that the activations
//! of all exist at once: GPipe's schedule, or one backward pass of the sum of their losses.

use std::ops::Range;

use memtrace_trace::ids::StackId;

use super::Recorded;
use super::calls::Call;
use crate::passes::lifetimes::BEFORE_STEPS;
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
/// backward passes. `calls` are the outermost calls of modules.
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
    let ends = calls[1..].iter().map(|call| call.events.start).chain([backward]);
    let after: Vec<Vec<(usize, StackId)>> =
        calls.iter().zip(ends).map(|(call, end)| allocated(recorded, call.events.end..end)).collect();
    // The last call is followed by its loss. After the losses of the others come the inputs of the next call.
    let stacks = |after: &[(usize, StackId)]| after.iter().map(|(_, stack)| *stack).collect::<Vec<StackId>>();
    let loss = stacks(after.last()?);
    if loss.is_empty() || !after.iter().all(|after| stacks(after).starts_with(&loss)) {
        return None;
    }
    let inputs = after.iter().map(|after| after.get(loss.len()).map(|(index, _)| *index));
    let begins = calls[1..].iter().zip(inputs).map(|(call, inputs)| inputs.unwrap_or(call.events.start));
    let starts: Vec<usize> = [first.events.start].into_iter().chain(begins).chain([backward]).collect();
    let mut found = Vec::new();
    for forward in starts.windows(2).map(|pair| pair[0]..pair[1]) {
        let saved = recorded.events[forward.clone()].iter().filter(|event| event.allocates);
        let saved = saved.map(|event| &recorded.blocks[event.block as usize]);
        let saved = saved.filter(|block| recorded.is_freed_by_node(block));
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

/// The allocations among the events: the index of the event, and the stack.
fn allocated(recorded: &Recorded<'_>, events: Range<usize>) -> Vec<(usize, StackId)> {
    let start = events.start;
    let all = recorded.events[events].iter().enumerate().filter(|(_, event)| event.allocates);
    all.map(|(index, event)| (start + index, recorded.blocks[event.block as usize].start.stack)).collect()
}
