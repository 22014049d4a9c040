//! One checkpoint for each of several modules, in the place of one around all of them.
//!
//! A checkpoint around several modules runs all of them again before the backward pass of the last one. The second
//! forward pass allocates what the first one allocated, so the first one shows which module each block belongs to.
//! Split, each module runs again when its own backward pass begins, and its result stays from the first forward pass.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::ids::ContextId;

use super::classes::{MAX_CLASSES, MIN_MODULES, SAME_PEAK, WORTH_CHECKPOINTING, members};
use super::replay::is_repeated;
use crate::passes::lifetimes::{BlockLifetime, NEVER};
use crate::passes::phase::Phase;
use crate::rules::RuleId;
use crate::suggestions::change::{Assumed, Change, ChangedBlocks, Order, SuggestionRule, Value};
use crate::suggestions::facts::Facts;
use crate::suggestions::recorded::Recorded;
use crate::suggestions::recorded::calls::Members;
use crate::suggestions::recorded::span::{Span, at, before};

const ACTION: &str = "one checkpoint for each of {layers} instead of one around several";

/// A second forward pass ends at the last tensor that was saved. It lacks at most so many blocks of the first one.
const EARLY_STOP: usize = 4;

/// Modules under one checkpoint, to be checkpointed one by one.
#[derive(Debug)]
struct Split {
    rule: &'static SuggestionRule,
    classes: BTreeSet<Box<str>>,
}

/// A block of a second forward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Recomputed {
    block: u32,
    /// The block of the first forward pass, if that allocated it too.
    forward: Option<u32>,
    member: u32,
}

/// The change for the class whose modules, checkpointed one by one, lower the peak most.
pub(super) fn find(facts: &Facts<'_>, rule: &'static SuggestionRule) -> Option<Box<dyn Change>> {
    let recorded = &facts.recorded;
    let recomputed = recorded.blocks.iter().filter(|block| block.start.phase == Phase::Recompute);
    let bytes: u64 = recomputed.filter(|block| block.includes(facts.peak_seq)).map(BlockLifetime::size).sum();
    if recorded.until != NEVER || bytes < facts.peak / WORTH_CHECKPOINTING {
        return None;
    }
    let replayed = |(_, class): (usize, Box<str>)| {
        let split = Split { rule, classes: BTreeSet::from([class]) };
        let mut blocks = ChangedBlocks::new(facts, Assumed::Largest);
        split.apply(facts, &mut blocks);
        (blocks.peak(facts), split)
    };
    // Those with the fewest modules come first.
    let all: Vec<(u64, Split)> = classes(recorded).into_iter().map(replayed).collect();
    let lowest = all.iter().map(|(peak, _)| *peak).min().filter(|peak| *peak < facts.summed)?;
    let (_, split) = all.into_iter().find(|(peak, _)| *peak <= lowest + lowest / SAME_PEAK)?;
    Some(Box::new(split))
}

impl Change for Split {
    fn rule(&self) -> &'static SuggestionRule {
        self.rule
    }

    fn order(&self) -> Order {
        Order::Saved
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        let recorded = &facts.recorded;
        let members = members(facts, &self.classes);
        for pass in second_passes(recorded, &members) {
            split(recorded, &members, &pass, &mut blocks.spans);
        }
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        // Both take the same activations away.
        other == RuleId::OffloadActivations
    }

    fn action(&self) -> &'static str {
        ACTION
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        let members = members(facts, &self.classes);
        let passes = second_passes(&facts.recorded, &members).into_iter().flatten();
        let numbers: BTreeSet<u32> = passes.map(|block| block.member).filter(|member| *member > 0).collect();
        let calls: Vec<ContextId> =
            numbers.iter().filter_map(|n| members.calls.get(*n as usize - 1).copied()).collect();
        vec![("layers", Value::Modules(calls))]
    }
}

/// Whether a forward pass allocates the block under a checkpoint.
fn is_first(recorded: &Recorded<'_>, block: &BlockLifetime) -> bool {
    block.start.phase == Phase::Forward && recorded.table.facts(block.start.stack).in_checkpoint
}

/// The classes of several modules under checkpoints, with the number of modules, fewest first.
fn classes(recorded: &Recorded<'_>) -> Vec<(usize, Box<str>)> {
    let first = recorded.blocks.iter().filter(|block| is_first(recorded, block));
    let contexts: BTreeSet<ContextId> = first.map(|block| recorded.contexts().module(block.start.context)).collect();
    let mut classes: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
    for context in contexts {
        for (_, call) in recorded.definitions.nn_call_chain(context) {
            classes.entry(&call.class).or_default().insert(call.object);
        }
    }
    let several = classes.into_iter().map(|(class, modules)| (modules.len(), class.into()));
    let mut several: Vec<(usize, Box<str>)> = several.filter(|(count, _)| *count >= MIN_MODULES).collect();
    several.sort_unstable();
    several.truncate(MAX_CLASSES);
    several
}

/// The second forward passes under checkpoints, with the blocks of the first ones. The backward pass runs them in the
/// reverse order.
fn second_passes(recorded: &Recorded<'_>, members: &Members) -> Vec<Vec<Recomputed>> {
    let mut passes = Vec::new();
    let (mut first, mut second): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
    let mut context = ContextId::NONE;
    for event in recorded.events.iter().filter(|event| event.allocates) {
        let block = &recorded.blocks[event.block as usize];
        let runs_again = block.start.phase == Phase::Recompute;
        if !second.is_empty() && (!runs_again || event.context != context) {
            passes.extend(aligned(recorded, members, &mut first, &second));
            second.clear();
        }
        context = event.context;
        if is_repeated(recorded, block) {
            match () {
                () if runs_again => second.push(event.block),
                () if is_first(recorded, block) => first.push(event.block),
                () => {}
            }
        }
    }
    passes.extend(aligned(recorded, members, &mut first, &second));
    passes
}

/// A second forward pass beside the end of the first ones, which it takes away. A pass without gradients allocates some
/// blocks fewer.
fn aligned(
    recorded: &Recorded<'_>,
    members: &Members,
    first: &mut Vec<u32>,
    second: &[u32],
) -> Option<Vec<Recomputed>> {
    let requested = |index: u32| recorded.blocks[index as usize].requested();
    let member = |index: u32| members.get(recorded.blocks[index as usize].start.context);
    let begins = (0..first.len()).filter(|at| *at == 0 || member(first[*at]) != member(first[*at - 1]));
    let pair = |begin: usize| {
        let mut next = begin;
        let pairs = second.iter().map(|block| {
            let forward = first.get(next).copied().filter(|first| requested(*first) == requested(*block));
            next += usize::from(forward.is_some());
            Recomputed { block: *block, forward, member: member(first[next.max(begin + 1) - 1]) }
        });
        let pairs: Vec<Recomputed> = pairs.collect();
        (next + EARLY_STOP >= first.len()).then_some((begin, pairs))
    };
    let found = begins.into_iter().find_map(pair);
    first.truncate(found.as_ref().map_or(0, |(begin, _)| *begin));
    found.map(|(_, pairs)| pairs)
}

/// Moves the second forward pass of each module but the last to the begin of its backward pass.
fn split(recorded: &Recorded<'_>, members: &Members, pass: &[Recomputed], spans: &mut [Span]) {
    let block = |index: u32| &recorded.blocks[index as usize];
    let Some(end) = pass.last().map(|last| block(last.block).allocated) else { return };
    let last = pass.last().map_or(0, |last| last.member);
    let position = |seq: u32| pass.partition_point(|other| block(other.block).allocated < seq);
    let parts: Vec<&[Recomputed]> = pass.chunk_by(|a, b| a.member == b.member).collect();
    for (part, next) in parts.iter().zip(parts.iter().skip(1)) {
        let member = part[0].member;
        if member == 0 || member == last {
            continue;
        }
        let next_begins = next.iter().find_map(|other| other.forward).map_or(NEVER, |first| block(first).allocated);
        let own_result = |other: &Recomputed| members.get(block(other.block).freed_context) == member;
        let is_result =
            |other: &Recomputed| other.forward.is_some_and(|f| block(f).freed > next_begins) && !own_result(other);
        let saved = part.iter().filter(|other| !is_result(other)).map(|other| block(other.block));
        let saved = saved.filter(|block| block.freed > end && recorded.is_freed_by_node(block));
        let Some(first) = saved.min_by_key(|block| block.freed) else { continue };
        // The node that frees it has made its results by then, after the second forward pass.
        let freed = recorded.events.partition_point(|event| event.seq < first.freed);
        let of_node = recorded.events[..freed].iter().rev().take_while(|event| event.context == first.freed_context);
        let begins = of_node.last().map_or(first.freed, |event| event.seq);
        for other in *part {
            let span = &mut spans[other.block as usize];
            if !span.exists() {
                continue;
            }
            if is_result(other) {
                span.vanish();
                other.forward.into_iter().for_each(|first| spans[first as usize].last_until(at(begins)));
                continue;
            }
            let block = block(other.block);
            if block.freed <= end {
                span.end = before(begins, position(block.freed));
            }
            span.start = before(begins, position(block.allocated));
            span.end = span.end.max(span.start + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::category::Category;
    use crate::suggestions::test_program::{CHECKPOINTED, FIRST, NODE_OF_FIRST, NODE_OF_SECOND, Program, SECOND};

    /// Each block keeps 100 MiB for its backward pass and results in 10 MiB.
    #[test]
    fn modules_under_one_checkpoint_run_again_one_by_one() {
        let mut program = Program::default();
        let forward = |program: &mut Program, mib, context| {
            let block = program.activation(mib, context);
            program.blocks[block].start.stack = CHECKPOINTED;
            block
        };
        let inner = forward(&mut program, 100, FIRST);
        let result = forward(&mut program, 10, FIRST);
        program.free(inner, FIRST);
        let inner = forward(&mut program, 100, SECOND);
        let last = forward(&mut program, 10, SECOND);
        program.free(inner, SECOND);
        program.free(result, ContextId::NONE);
        program.passes = 1;
        program.free(last, ContextId::NONE);
        let [first, result, second] =
            [100, 10, 100].map(|mib| program.alloc(mib, Phase::Recompute, Category::Activation, NODE_OF_SECOND));
        let gradient = program.alloc(20, Phase::Backward, Category::AutogradDetail, NODE_OF_SECOND);
        program.free(second, NODE_OF_SECOND);
        program.free(result, NODE_OF_SECOND);
        program.free(first, NODE_OF_FIRST);
        program.free(gradient, NODE_OF_FIRST);
        assert_eq!(program.peak(), 210 + 20);
        // One block, the result before it and the gradient.
        assert_eq!(program.peak_with(|facts| find(facts, &crate::suggestions::checkpoint_layers::RULE)), 110 + 20);
    }
}
