//! Forward passes that no backward pass follows, without gradients.
//!
//! Without gradients a block is freed when the last operation that reads it is done ([`super::reads`]), except for the
//! last blocks of the outermost call, which are its results.

use std::collections::{BTreeSet, HashSet};

use super::calls::{Call, Members, calls_with_gradients};
use super::reads::{is_read_by, read_until};
use super::recorded::Recorded;
use super::span::{Span, after};
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;

/// A graph has at least this many blocks that outlive the call.
const GRAPH_BLOCKS: usize = 3;
/// The last blocks of a call that outlive it are its results.
const RESULTS: usize = 2;

/// Whether a call's block lives longer because autograd records.
fn is_result(block: &BlockLifetime) -> bool {
    matches!(block.category, Category::Activation | Category::Temporary | Category::AutocastCache)
}

/// Those of the [`outermost_calls`] that build a graph which no backward pass uses. A graph that stays up to the end of
/// the recording is one of them only if the recording ends in an evaluation: other graphs of a recording without any
/// backward pass were freed unused.
pub(super) fn unused_graphs(recorded: &Recorded<'_>, mut calls: Vec<Call>) -> Vec<Call> {
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
    calls.retain(|call| is_unused(call, ends_in_evaluation));
    calls
}

/// The outermost calls of modules with gradients.
pub(super) fn outermost_calls(recorded: &Recorded<'_>) -> Vec<Call> {
    let all = &recorded.definitions.nn_calls;
    let roots: BTreeSet<&str> = all.values().filter(|call| call.caller.is_none()).map(|call| &*call.class).collect();
    calls_with_gradients(recorded, &Members::of(recorded, &roots))
}

/// By index: the blocks that outlive an outermost call of a module and are not its results. Only a graph keeps them.
pub(super) fn graph_blocks(recorded: &Recorded<'_>, outermost: &[Call]) -> HashSet<u32> {
    let inner = |call: &Call| -> Vec<u32> {
        let end = call.end(recorded);
        let outlives = |index: &&u32| recorded.blocks[**index as usize].freed > end;
        call.blocks.iter().rev().filter(outlives).skip(RESULTS).copied().collect()
    };
    outermost.iter().flat_map(inner).collect()
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
