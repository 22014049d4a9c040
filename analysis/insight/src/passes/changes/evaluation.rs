//! Forward passes that no backward pass follows, without gradients.
//!
//! Without gradients a block is freed when the last operation that reads it is done. The recording does not show when that
//! is. It ends with the call of the module around the one that allocated it at the latest, except for the last blocks of
//! the outermost call, which are its results. The new peak is reported only if it does not depend on these times.

use std::collections::{BTreeSet, HashMap, HashSet};

use memtrace_trace::ids::ContextId;

use super::calls::{Call, Members, calls};
use super::recorded::Recorded;
use super::span::{Key, Span, after};
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
/// the recording is one of them only if the recording ends in an evaluation.
pub(super) fn unused_graphs(recorded: &Recorded<'_>, mut calls: Vec<Call>) -> Vec<Call> {
    calls.retain(|call| {
        let end = call.end(recorded);
        let kept = || {
            let blocks = call.blocks.iter().map(|index| &recorded.blocks[*index as usize]);
            blocks.filter(|block| is_result(block) && (block.freed > end || !recorded.is_freed(block)))
        };
        let is_unused = |block: &BlockLifetime| match recorded.is_freed(block) {
            true => !recorded.is_freed_by_node(block),
            false => recorded.ends_in_unused_graph,
        };
        kept().count() >= GRAPH_BLOCKS && kept().all(is_unused)
    });
    calls
}

/// The outermost calls of modules.
pub(super) fn outermost_calls(recorded: &Recorded<'_>) -> Vec<Call> {
    let all = &recorded.definitions.nn_calls;
    let roots: BTreeSet<&str> = all.values().filter(|call| call.caller.is_none()).map(|call| &*call.class).collect();
    calls(recorded, &Members::of(recorded, &roots))
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

/// Frees the blocks of these calls without gradients. `at_once`: as soon as they are allocated.
pub(super) fn without_gradients(recorded: &Recorded<'_>, unused: &[Call], at_once: bool, spans: &mut [Span]) {
    for call in unused {
        let end = call.end(recorded);
        let outlives = |index: &&u32| recorded.blocks[**index as usize].freed > end;
        let results: Vec<u32> = call.blocks.iter().rev().filter(outlives).take(RESULTS).copied().collect();
        // By caller: the index of the first event after its call.
        let mut ends: HashMap<ContextId, usize> = HashMap::new();
        for index in call.blocks.iter().filter(|index| !results.contains(index)) {
            let block = &recorded.blocks[*index as usize];
            let span = &mut spans[*index as usize];
            if !is_result(block) || block.freed <= end {
                continue;
            }
            span.end_by(if at_once { span.start } else { caller_ends(recorded, call, block, &mut ends) });
        }
    }
}

/// When the call around the one that allocated a block ends.
fn caller_ends(
    recorded: &Recorded<'_>,
    call: &Call,
    block: &BlockLifetime,
    ends: &mut HashMap<ContextId, usize>,
) -> Key {
    let calls = &recorded.definitions.nn_calls;
    let caller = calls.get(&block.context).map_or(ContextId::NONE, |call| call.caller);
    let start = recorded.first_event_after(block.allocated);
    let is_inside = |context: ContextId| {
        let mut at = context;
        while at != caller {
            match calls.get(&at) {
                Some(call) => at = call.caller,
                None => return false,
            }
        }
        true
    };
    let end = ends.get(&caller).copied().filter(|end| *end > start).unwrap_or_else(|| {
        let later = &recorded.events[start..call.events.end.max(start)];
        start + later.iter().position(|event| !is_inside(event.context)).unwrap_or(later.len())
    });
    ends.insert(caller, end);
    after(recorded.events[end.max(1) - 1].seq)
}
