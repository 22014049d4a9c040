//! Activation checkpointing of modules, as `torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)` does it.
//!
//! While a checkpointed module runs forward, autograd keeps nothing of it: what only its own backward pass needs is
//! freed when the module's code has read it. Its results stay, because later modules need them. Its inputs stay for the
//! second forward pass. When the first of its nodes needs a saved tensor, the forward pass runs again, up to the last
//! tensor that was saved. From there on the saved tensors live as recorded.
//!
//! Copies of weights that autocast makes stay until the region of autocast ends, and are made again.

use std::collections::HashMap;

use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::suggestions::recorded::calls::{Call, Members};
use crate::suggestions::recorded::reads::unpacked_until;
use crate::suggestions::recorded::span::{Key, Span, after, at, before};
use crate::suggestions::recorded::{BlockEvent, Recorded};

/// Whether the call allocates the block again when it is repeated. Workspaces, for example, exist by then.
pub(super) fn is_repeated(recorded: &Recorded<'_>, block: &BlockLifetime) -> bool {
    matches!(block.category, Category::Activation | Category::Temporary | Category::AutocastCache)
        || block.category == Category::Workspace && recorded.is_no_workspace(block)
}

/// The role of a block of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    /// The call itself frees it.
    Temporary,
    /// Only the call's own backward pass needs it.
    Saved,
    /// Others need it after the call.
    Kept,
    /// Others need it after the call, and so does the call's own backward pass.
    KeptAndSaved,
    /// The recording does not show it.
    Unknown,
    /// It belongs to the process.
    Lasting,
}

impl Role {
    /// Whether the call's own backward pass needs the block.
    fn is_saved(self) -> bool {
        matches!(self, Role::Saved | Role::KeptAndSaved)
    }
}

/// A result is at least as large as 6.25 % (1/16) of the largest block of its call.
const SMALLEST_RESULT: u64 = 16;

/// The bytes of a single number, such as a loss, which can save its input.
const LARGEST_SCALAR: u64 = 16;

/// The number of parts of a call after which nothing reads a block of an earlier part any more.
const READ_IN_PARTS: usize = 2;

fn roles(recorded: &Recorded<'_>, members: &Members, call: &Call) -> Vec<Role> {
    let end = call.end(recorded);
    let role = |index: &u32| {
        let block = &recorded.blocks[*index as usize];
        match () {
            () if !is_repeated(recorded, block) => Role::Lasting,
            () if !recorded.is_freed(block) => Role::Unknown,
            () if block.freed <= end => Role::Temporary,
            () if recorded.is_freed_by_node(block) && members.get(block.freed_context) == call.member => Role::Saved,
            () => Role::Kept,
        }
    };
    call.blocks.iter().map(role).collect()
}

/// The result of a call whose own backward pass is the last to need it. That is the block that the backward pass frees
/// first, because the result comes last. `None` if the call has another result.
fn saved_result(recorded: &Recorded<'_>, call: &Call, roles: &[Role]) -> Option<usize> {
    let of = |needed: Role| {
        let all = call.blocks.iter().zip(roles).enumerate().filter(move |(_, (_, role))| **role == needed);
        all.map(|(at, (index, _))| (at, &recorded.blocks[*index as usize]))
    };
    let largest = of(Role::Saved).map(|(_, block)| block.size()).max()?;
    if of(Role::Kept).any(|(_, block)| block.size() >= largest / SMALLEST_RESULT) {
        return None;
    }
    let candidates = || of(Role::Saved).filter(|(_, block)| block.size() >= largest / SMALLEST_RESULT);
    let (_, first) = candidates().min_by_key(|(_, block)| block.freed)?;
    // A node can free several blocks, in any order. The result is the one that was allocated last.
    candidates().filter(|(_, block)| block.freed_context == first.freed_context).map(|(at, _)| at).next_back()
}

/// Whether the code after a call averages its result over positions, as before a classifier. An average saves only the
/// shape of its input.
fn is_averaged(recorded: &Recorded<'_>, call: &Call, result: usize) -> bool {
    let result = &recorded.blocks[call.blocks[result] as usize];
    let contexts = recorded.contexts();
    let mut later = recorded.events[call.events.end..].iter().take_while(|event| !contexts.is_node(event.context));
    let Some(next) = later.find(|event| event.allocates) else { return false };
    let bytes = recorded.blocks[next.block as usize].requested();
    let calls = &recorded.definitions.nn_calls;
    let module = contexts.module(next.context);
    let is_around = calls.get(&contexts.module(result.start.context)).is_some_and(|own| {
        let outer = std::iter::successors(Some(own), |call| calls.get(&call.caller));
        outer.into_iter().any(|call| call.caller == module)
    });
    let is_pooling = calls.get(&module).is_some_and(|call| call.class.starts_with("AdaptiveAvgPool"));
    (is_around || is_pooling) && bytes > LARGEST_SCALAR && bytes * SMALLEST_RESULT <= result.requested()
}

/// Roles of blocks that the recording does not show freed: those of a complete call with as many blocks of the same
/// class, else the last large block is the result.
fn complete(recorded: &Recorded<'_>, call: &Call, roles: &mut [Role], like: Option<&Vec<Role>>) {
    if let Some(like) = like {
        for (role, like) in roles.iter_mut().zip(like) {
            if *role == Role::Unknown {
                *role = *like;
            }
        }
        return;
    }
    let size = |index: &u32| recorded.blocks[*index as usize].size();
    let unknown = || call.blocks.iter().zip(roles.iter()).filter(|(_, role)| **role == Role::Unknown);
    let largest = unknown().map(|(index, _)| size(index)).max().unwrap_or(0);
    let result = call
        .blocks
        .iter()
        .zip(roles.iter())
        .rposition(|(index, role)| *role == Role::Unknown && size(index) >= largest / SMALLEST_RESULT);
    for (at, role) in roles.iter_mut().enumerate().filter(|(_, role)| **role == Role::Unknown) {
        *role = if Some(at) == result { Role::Kept } else { Role::Saved };
    }
}

fn has_saved(roles: &[Role]) -> bool {
    roles.iter().any(|role| role.is_saved())
}

/// Roles in a call whose graph no backward pass reads, as of an evaluation with gradients: no node frees what it saved,
/// but a call of the same class with as many blocks shows what that is.
fn without_backward(roles: &mut [Role], like: &[Role]) {
    for (role, like) in roles.iter_mut().zip(like) {
        if *role == Role::Kept && *like == Role::Saved {
            *role = Role::Saved;
        }
    }
}

/// The time at which the backward pass of a call begins: `seq` of the first event of its nodes.
fn backward_begins(recorded: &Recorded<'_>, members: &Members, call: &Call, roles: &[Role]) -> Option<u32> {
    let saved = call.blocks.iter().zip(roles).filter(|(_, role)| role.is_saved());
    let saved = saved.map(|(index, _)| &recorded.blocks[*index as usize]).filter(|b| recorded.is_freed_by_node(b));
    let first = saved.map(|block| block.freed).min()?;
    let mut at = recorded.events.partition_point(|event| event.seq < first);
    while let Some(event) = at.checked_sub(1).map(|before| recorded.events[before]) {
        if !recorded.contexts().is_node(event.context) || members.get(event.context) != call.member {
            break;
        }
        at -= 1;
    }
    recorded.events.get(at).map(|event| event.seq)
}

/// Checkpoints each of the calls.
pub(super) fn checkpoint(recorded: &Recorded<'_>, members: &Members, calls: &[Call], spans: &mut Vec<Span>) {
    let mut all: Vec<Vec<Role>> = calls.iter().map(|call| roles(recorded, members, call)).collect();
    // By class and number of blocks: the roles in a complete call.
    let mut like: HashMap<(&str, usize), usize> = HashMap::new();
    let class = |call: &Call| {
        let of = members.calls.get(call.member as usize - 1).and_then(|id| recorded.definitions.nn_calls.get(id));
        (of.map_or("", |of| &*of.class), call.blocks.len())
    };
    for (index, call) in calls.iter().enumerate() {
        if all[index].contains(&Role::Unknown) {
            let like = like.get(&class(call)).map(|index| all[*index].clone());
            complete(recorded, call, &mut all[index], like.as_ref());
        }
        if let Some(result) = saved_result(recorded, call, &all[index]).filter(|at| !is_averaged(recorded, call, *at)) {
            all[index][result] = Role::KeptAndSaved;
        }
        let is_open = |block: &u32| {
            let block = &recorded.blocks[*block as usize];
            is_repeated(recorded, block) && !recorded.is_freed(block)
        };
        // An evaluation shows less of what a call saves.
        if !call.blocks.iter().any(is_open) && (has_saved(&all[index]) || !like.contains_key(&class(call))) {
            like.insert(class(call), index);
        }
    }
    for (index, call) in calls.iter().enumerate() {
        let like = like.get(&class(call)).filter(|_| !has_saved(&all[index])).map(|like| all[*like].clone());
        if let Some(like) = like {
            without_backward(&mut all[index], &like);
        }
    }
    for (call, roles) in calls.iter().zip(&all) {
        one(recorded, members, call, roles, spans);
        keep_inputs(recorded, members, call, roles, spans);
    }
}

/// Keeps the inputs of a call until its backward pass ends, for the repeated forward pass. A block from before the call
/// is an input if the call frees it, or if it is freed right after the call, where a new value replaces it and no code
/// around the call has read it.
fn keep_inputs(recorded: &Recorded<'_>, members: &Members, call: &Call, roles: &[Role], spans: &mut [Span]) {
    let start = recorded.events[call.events.start].seq;
    let saved = call.blocks.iter().zip(roles).filter(|(_, role)| role.is_saved());
    let mut saved = saved.map(|(index, _)| &recorded.blocks[*index as usize]).peekable();
    if saved.peek().is_none() {
        return;
    }
    let is_own =
        |block: &&BlockLifetime| recorded.is_freed_by_node(block) && members.get(block.freed_context) == call.member;
    let end = saved.filter(is_own).map(|block| block.freed).max().map_or(Key::MAX, at);
    let is_input = |event: &&BlockEvent| {
        let block = &recorded.blocks[event.block as usize];
        let is_computed = block.start.phase == Phase::Forward && is_repeated(recorded, block);
        !event.allocates && block.allocated < start && is_computed && !recorded.contexts().is_node(event.context)
    };
    let inside = recorded.events[call.events.clone()].iter().filter(is_input);
    let later = recorded.events[call.events.end..].iter().take_while(|event| !event.allocates).filter(is_input);
    let replaced: Vec<&BlockEvent> = later.collect();
    // Of several values that are replaced, those that the code around the call has read are no inputs.
    let around = members.calls.get(call.member as usize - 1).and_then(|id| recorded.definitions.nn_calls.get(id));
    let is_read_around = |event: &&BlockEvent| {
        let block = &recorded.blocks[event.block as usize];
        let before = &recorded.events[recorded.first_event_after(block.allocated)..call.events.start];
        before.iter().any(|other| {
            let result = &recorded.blocks[other.block as usize];
            other.allocates
                && around.is_some_and(|call| call.caller == other.context)
                && result.requested() == block.requested()
        })
    };
    let unread: Vec<&BlockEvent> = replaced.iter().copied().filter(|event| !is_read_around(event)).collect();
    let replaced = if unread.is_empty() { replaced } else { unread };
    for event in inside.chain(replaced) {
        spans[event.block as usize].last_until(end);
    }
}

fn one(recorded: &Recorded<'_>, members: &Members, call: &Call, roles: &[Role], spans: &mut Vec<Span>) {
    let begins = backward_begins(recorded, members, call, roles);
    let end = call.end(recorded);
    let last_saved = call.blocks.iter().zip(roles).filter(|(_, role)| role.is_saved()).map(|(index, _)| *index).max();
    // Where autocast ends, if it ended before the backward pass.
    let backward = recorded.events[call.events.end..].iter().find(|e| recorded.contexts().is_node(e.context));
    let forward_end = backward.map_or(Key::MAX, |event| at(event.seq));
    // Parts of the call in which one module runs, by the first and the last event. A block is read until the end of the
    // second part after its own: by the next module, or by the code around both.
    let parts: Vec<(u32, u32)> = recorded.events[call.events.clone()]
        .chunk_by(|a, b| a.context == b.context)
        .filter_map(|part| Some((part.first()?.seq, part.last()?.seq)))
        .collect();
    let last_read = |seq: u32| {
        let own = parts.partition_point(|(first, _)| *first <= seq).saturating_sub(1);
        parts.get(own + READ_IN_PARTS).map_or(end, |(_, last)| *last)
    };
    // By event of the call: its number in the repeated forward pass.
    let first = call.events.start;
    let repeated = |seq: u32| recorded.events[first..call.events.end].partition_point(|event| event.seq < seq);
    for (index, role) in call.blocks.iter().zip(roles) {
        let span = spans[*index as usize];
        if !span.exists() {
            continue;
        }
        let block = &recorded.blocks[*index as usize];
        let copy = |end: Key| {
            let begins = begins?;
            let start = before(begins, repeated(block.allocated));
            (Some(*index) <= last_saved).then_some(Span { start, end: end.max(start + 1), ..span })
        };
        let repeats_until = |seq: u32| begins.map_or(0, |begins| before(begins, repeated(seq)));
        let again = match role {
            Role::Temporary => copy(repeats_until(block.freed)),
            Role::Kept => copy(repeats_until(end)),
            Role::Saved | Role::KeptAndSaved => copy(span.end.min(unpacked_until(recorded, block))),
            Role::Unknown | Role::Lasting => None,
        };
        let stays = match role {
            Role::Saved if block.category == Category::AutocastCache => forward_end,
            Role::Saved => after(last_read(block.allocated)),
            Role::KeptAndSaved => begins.map_or(Key::MAX, |begins| before(begins, 0)),
            _ => Key::MAX,
        };
        spans[*index as usize].end_by(stays);
        spans.extend(again);
    }
}
