//! Until when a forward pass without gradients keeps what it allocates.
//!
//! A recording with gradients does not show it, because the graph keeps all that it needs. Modules and lines show how
//! the blocks are used: a module keeps its arguments until it returns, a value of the same statement is used by the
//! next operation of that statement, and a variable by the next operation of the code that assigned it.

use memtrace_trace::file::Frame;
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use super::Recorded;
use super::calls::Call;
use super::span::{Key, after};
use crate::passes::lifetimes::{BlockLifetime, LifetimeStart};

/// The calls of modules in which a block was allocated.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ModuleCallStack {
    /// The calls, outermost first.
    calls: Vec<ContextId>,
    /// The line at which each of them was, outermost first.
    lines: Vec<FrameId>,
}

impl ModuleCallStack {
    fn of(recorded: &Recorded<'_>, start: &LifetimeStart) -> ModuleCallStack {
        let mut calls = Vec::new();
        let mut at = recorded.contexts().module(start.context);
        while let Some(call) = recorded.definitions.nn_calls.get(&at) {
            calls.push(at);
            at = call.caller;
        }
        calls.reverse();
        ModuleCallStack { calls, lines: lines(recorded, start.stack) }
    }

    /// The line in the code of the call number `depth`; `None` where calls and stack do not match.
    fn line(&self, depth: usize) -> Option<FrameId> {
        let more = self.lines.len().checked_sub(self.calls.len())?;
        self.lines.get(more + depth).copied()
    }

    /// The number of calls that both are in.
    fn shared(&self, other: &ModuleCallStack) -> usize {
        self.calls.iter().zip(&other.calls).take_while(|(a, b)| a == b).count()
    }

    fn is_in(&self, calls: &[ContextId]) -> bool {
        self.calls.starts_with(calls)
    }
}

/// The frames of `forward` of the modules that a stack is in, outermost first.
fn lines(recorded: &Recorded<'_>, stack: StackId) -> Vec<FrameId> {
    let is_of_module = |frame: &Frame| frame.filename.ends_with("torch/nn/modules/module.py");
    let mut lines = Vec::new();
    let mut inner = FrameId::NONE;
    for (_, id) in recorded.definitions.walk_ids(stack) {
        let Some(frame) = recorded.definitions.frame(id).filter(|frame| !frame.native) else { continue };
        if is_of_module(frame) {
            if &*frame.name == "_call_impl" && !inner.is_none() {
                lines.push(inner);
            }
            inner = FrameId::NONE;
        } else {
            inner = id;
        }
    }
    lines.reverse();
    lines
}

/// Whether one line calls the modules that allocate both blocks, as a loop over layers does: the second reads the
/// first.
pub(crate) fn is_read_by(recorded: &Recorded<'_>, value: &BlockLifetime, reader: &BlockLifetime) -> bool {
    let (value, reader) = (ModuleCallStack::of(recorded, &value.start), ModuleCallStack::of(recorded, &reader.start));
    let shared = value.shared(&reader);
    let line = |place: &ModuleCallStack| shared.checked_sub(1).and_then(|depth| place.line(depth));
    shared < value.calls.len() && shared < reader.calls.len() && line(&value).is_some_and(|l| line(&reader) == Some(l))
}

/// For each block of a call, in order: when it would be freed without gradients. The call's last blocks end with it.
pub(crate) fn read_until(recorded: &Recorded<'_>, call: &Call) -> Vec<Key> {
    let blocks: Vec<&BlockLifetime> = call.blocks.iter().map(|index| &recorded.blocks[*index as usize]).collect();
    let places: Vec<ModuleCallStack> = blocks.iter().map(|block| ModuleCallStack::of(recorded, &block.start)).collect();
    let allocated = |at: usize| blocks.get(at).map_or(after(call.end(recorded)), |block| after(block.allocated));
    let mut ends = Vec::with_capacity(blocks.len());
    let mut first = 0;
    for part in places.chunk_by(|a, b| a.calls == b.calls) {
        let next = first + part.len();
        // A module that calls no other can allocate more than its result, for example the means of a normalization.
        let calls_others =
            places.iter().any(|place| place.calls.len() > part[0].calls.len() && place.is_in(&part[0].calls));
        let result = match calls_others {
            true => next - 1,
            false => (first..next).max_by_key(|at| blocks[*at].size()).unwrap_or(first),
        };
        for at in first..next {
            ends.push(if at == result {
                result_ends(recorded, &places, at, next, allocated)
            } else {
                allocated(at + 1)
            });
        }
        first = next;
    }
    ends
}

/// When a node frees a copy of a saved tensor that it has unpacked, as checkpointing and saved tensors in host memory
/// make it. A saved tensor itself stays until the node's results have the right shape, which for the bias of a linear
/// layer needs a sum. The sum follows the gradients of input and weight, and can take a buffer larger than its input.
pub(crate) fn unpacked_until(recorded: &Recorded<'_>, block: &BlockLifetime) -> Key {
    let is_linear = |context: ContextId| {
        recorded.definitions.contexts.get(context.index()).is_some_and(|context| &*context.node == "AddmmBackward0")
    };
    if !recorded.is_freed(block) || !is_linear(block.freed_context) {
        return Key::MAX;
    }
    let freed = recorded.events.partition_point(|event| event.seq < block.freed);
    let of_node = recorded.events[..freed].iter().rev().take_while(|event| event.context == block.freed_context);
    let mut allocated: Vec<u32> = of_node.filter(|event| event.allocates).map(|event| event.seq).collect();
    allocated.reverse();
    match allocated[..] {
        [_, weight, _, ..] => after(weight),
        _ => Key::MAX,
    }
}

/// When the result of some code is freed. `next` is the first block of other code.
fn result_ends(
    recorded: &Recorded<'_>,
    places: &[ModuleCallStack],
    result: usize,
    next: usize,
    allocated: impl Fn(usize) -> Key,
) -> Key {
    let own = &places[result];
    let Some(reader) = places.get(next) else { return allocated(places.len()) };
    let shared = own.shared(reader);
    if shared == 0 || reader.calls.len() == shared {
        // The code around both reads it.
        return allocated(next);
    }
    let entered = &reader.calls[..=shared];
    let inside = places[next..].iter().take_while(|place| place.is_in(entered)).count();
    let returns = allocated(next + inside - 1);
    let line = own.line(shared - 1);
    if line.is_some() && line == reader.line(shared - 1) {
        return returns;
    }
    // A variable. The results of projections in parallel, such as queries, keys and values, are used together.
    let class = |call: ContextId| recorded.definitions.nn_calls.get(&call).map(|call| &*call.class);
    let is_projection = |place: &ModuleCallStack| place.calls.len() == shared + 1;
    let is_parallel = is_projection(own) && is_projection(reader) && class(own.calls[shared]) == class(entered[shared]);
    if own.calls.len() > shared && !is_parallel {
        return returns;
    }
    let around = &reader.calls[..shared];
    let later = places[next..].iter().take_while(|place| place.is_in(around));
    later.enumerate().find(|(_, place)| place.calls.len() == shared).map_or(returns, |(at, _)| allocated(next + at))
}
