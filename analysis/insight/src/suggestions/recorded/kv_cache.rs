//! Key-value caches that nothing reads: `use_cache=False`.
//!
//! The models of transformers keep the keys and values of all layers unless `use_cache` is false. A forward pass that
//! generates nothing has no use for them. The cache joins the new keys and values with those of earlier calls, in a
//! block for each. Without a cache, a layer's keys and values are needed until its attention has run, and until its
//! backward pass if the graph saves them.

use std::collections::{BTreeMap, HashMap, HashSet};

use memtrace_trace::file::Frame;
use memtrace_trace::ids::{ContextId, StackId};

use super::Recorded;
use super::span::{Span, after};
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;

/// The file of the caches, and the functions that fill them.
const CACHES: &str = "/transformers/cache_utils.py";
const FILLS: [&str; 2] = ["update", "lazy_initialization"];
/// The folder of the code that reads caches.
const GENERATION: &str = "/transformers/generation/";
/// The function that copies a cache for several continuations.
const COPIES: (&str, &str) = ("/copy.py", "deepcopy");
/// The function that repeats keys and values for several heads.
const REPEATS: &str = "repeat_kv";
/// One operation that repeats keys and values by itself allocates at least this many blocks of the repeated size.
const REPEATED: usize = 3;
/// A cache that is still there at so many later calls of its layer is kept for them.
const LATER_CALLS: u32 = 2;

/// The way in which a stack uses caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    /// Nothing.
    None,
    /// The innermost frame fills a cache at this line, inside `generate` or not.
    Fills { line: u32, in_generation: bool },
    /// The innermost frame of the caches' code does something else.
    Changes,
    /// Copies objects.
    Copies,
}

/// Keys or values in a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    /// The index of the block.
    block: u32,
    /// `seq` of the last event in the call of the layer that filled the cache.
    end: u32,
    /// The number of later calls of the layer at which the block is still allocated.
    later: u32,
    in_generation: bool,
}

/// Blocks of caches that nothing reads, each with the last event that needs it without a cache.
pub(crate) fn unread(recorded: &Recorded<'_>) -> Vec<(u32, u32)> {
    let mut uses: HashMap<StackId, Use> = HashMap::new();
    let mut entries: Vec<Entry> = Vec::new();
    // By layer and line: the indices of entries that are still allocated at its latest call.
    let mut allocated: HashMap<(u64, u32), Vec<usize>> = HashMap::new();
    let mut copied = HashSet::new();
    for (index, block) in recorded.blocks.iter().enumerate() {
        match *uses.entry(block.start.stack).or_insert_with(|| use_of(recorded, block.start.stack)) {
            Use::None => {}
            Use::Changes => return Vec::new(),
            Use::Copies => {
                copied.insert(block.requested());
            }
            Use::Fills { line, in_generation } => {
                let call = recorded.contexts().module(block.start.context);
                let Some(layer) = recorded.definitions.nn_calls.get(&call) else { continue };
                let in_generation = in_generation || matches!(block.start.phase, Phase::Generate | Phase::Rollout);
                let end = end_of_call(recorded, block, call);
                let earlier = allocated.entry((layer.object, line)).or_default();
                let freed = |entry: &Entry| recorded.blocks[entry.block as usize].freed;
                earlier.retain(|index| freed(&entries[*index]) > block.allocated);
                for index in earlier.iter() {
                    let entry = &mut entries[*index];
                    entry.later += u32::from(!in_generation);
                    // Joined with the new keys or values, or kept for several calls: something reads the cache.
                    let is_read = freed(entry) <= end || entry.later >= LATER_CALLS;
                    if is_read && !entry.in_generation {
                        return Vec::new();
                    }
                }
                earlier.push(entries.len());
                entries.push(Entry { block: index as u32, end, later: 0, in_generation });
            }
        }
    }
    let nodes: Vec<u32> =
        recorded.events.iter().filter(|e| recorded.contexts().is_node(e.context)).map(|event| event.seq).collect();
    let mut unread = Vec::new();
    for Entry { block: index, end, .. } in entries.into_iter().filter(|entry| !entry.in_generation) {
        let block = &recorded.blocks[index as usize];
        if copied.contains(&block.requested()) {
            return Vec::new();
        }
        if block.freed > end && !is_saved(recorded, block, end, &nodes) {
            unread.push((index, end));
        }
    }
    unread
}

/// Frees the blocks when their layer's attention has run.
pub(crate) fn without_cache(unread: &[(u32, u32)], spans: &mut [Span]) {
    for (block, end) in unread {
        spans[*block as usize].end_by(after(*end));
    }
}

fn use_of(recorded: &Recorded<'_>, stack: StackId) -> Use {
    let frames = || {
        let frames = recorded.definitions.walk(stack);
        frames.filter_map(|(_, frame)| frame.filter(|frame| !frame.native))
    };
    match frames().next() {
        Some(frame) if frame.filename.ends_with(CACHES) => {
            let in_generation = frames().any(|frame| frame.filename.contains(GENERATION));
            match FILLS.iter().any(|name| is_function(frame, name)) {
                true => Use::Fills { line: frame.line, in_generation },
                // Generation does more with caches, which says nothing about other calls.
                false if in_generation => Use::None,
                false => Use::Changes,
            }
        }
        _ if frames().any(|frame| frame.filename.ends_with(COPIES.0) && is_function(frame, COPIES.1)) => Use::Copies,
        _ => Use::None,
    }
}

/// Whether a frame runs this function. Names can begin with that of the class.
fn is_function(frame: &Frame, name: &str) -> bool {
    frame.name.rsplit('.').next() == Some(name)
}

/// `seq` of the last event in the call `call` around a block's allocation.
fn end_of_call(recorded: &Recorded<'_>, block: &BlockLifetime, call: ContextId) -> u32 {
    let is_inside = |context: ContextId| {
        let mut at = context;
        while at != call {
            match recorded.definitions.nn_calls.get(&at) {
                Some(inner) => at = inner.caller,
                None => return false,
            }
        }
        true
    };
    let events = recorded.events[recorded.first_event_after(block.allocated)..].iter();
    let inside = events.take_while(|event| is_inside(event.context));
    inside.last().map_or(block.allocated, |event| event.seq)
}

/// Whether the graph can need the block, too. `nodes` has the `seq` of the events in autograd nodes. `end` is that of
/// the last event in the call of the layer.
fn is_saved(recorded: &Recorded<'_>, block: &BlockLifetime, end: u32, nodes: &[u32]) -> bool {
    if block.start.is_without_gradients {
        return false;
    }
    if recorded.is_freed_by_node(block) {
        return true;
    }
    let from = recorded.first_event_after(block.allocated);
    let events = recorded.events[from..].iter().take_while(|event| event.seq <= end);
    let call: Vec<&BlockLifetime> =
        events.filter(|event| event.allocates).map(|event| &recorded.blocks[event.block as usize]).collect();
    // The cache ends before the backward pass, and the graph does not keep the block for it.
    let next = nodes.get(nodes.partition_point(|seq| *seq <= block.allocated));
    let is_freed_before = recorded.is_freed(block) && next.is_none_or(|next| block.freed < *next);
    if is_freed_before && call.iter().any(|other| recorded.is_freed_by_node(other) && other.freed > block.freed) {
        return false;
    }
    // The graph saves the repeated keys and values instead.
    let own = call.into_iter().filter(|other| other.start.context == block.start.context);
    let (size, mut by_stack) = (block.requested().max(1), BTreeMap::new());
    for other in own.filter(|other| other.requested() > size && other.requested() % size == 0) {
        *by_stack.entry((other.start.stack, other.requested())).or_insert(0usize) += 1;
    }
    let repeats = |stack: StackId| {
        let mut frames = recorded.definitions.walk(stack).filter_map(|(_, frame)| frame);
        frames.any(|frame| !frame.native && is_function(frame, REPEATS))
    };
    !by_stack.into_iter().any(|((stack, _), count)| count >= REPEATED || repeats(stack))
}
