//! Goes over the operations of the forward passes and decides the types of their values.

use memtrace_trace::ids::ContextId;

use super::cast::Cast;
use super::cast::Width::{self, Full, Half};
use super::places::{AutogradSite, AutogradSites, Kind};
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::{AutocastType, autocast_type_of_class};
use crate::suggestions::recorded::Recorded;

/// A result is at least as large as 6.25 % (1/16) of the largest block of its operation. Others are statistics.
const SMALLEST_RESULT: u64 = 16;
/// How many values before an operation are searched for its inputs.
const LATEST_VALUES: usize = 64;

/// A result of an operation, or an input of the model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Value {
    pub(super) block: u32,
    pub(super) width: Width,
}

/// Finds the types of all values. Where the recording does not show the type of a value, it is `assumed`.
pub(super) fn find(recorded: &Recorded<'_>, places: &AutogradSites, assumed: Width) -> Cast {
    let mut cast = Cast { drops_workspaces: assumed == Half, ..Cast::default() };
    let contexts = recorded.contexts();
    let mut pass = Pass {
        recorded,
        places,
        assumed,
        values: Vec::new(),
        widths: vec![None; recorded.blocks.len()],
        open: Vec::new(),
        first: 0,
        nodes: recorded.events.iter().filter(|event| contexts.is_node(event.context)).map(|e| e.seq).collect(),
    };
    let is_computed = |block: &BlockLifetime| {
        use Category::{AutocastCache, CommunicationBucket, Gradient, Input, OptimizerState, Parameter, Workspace};
        let is_other = matches!(
            block.category,
            AutocastCache | CommunicationBucket | Gradient | Input | OptimizerState | Parameter | Workspace
        );
        block.start.phase == Phase::Forward && !is_other
    };
    let mut visit: Vec<u32> = Vec::new();
    let place_of = |block: &BlockLifetime| (recorded.table.python(block.start.stack), block.start.context);
    for (index, block) in recorded.blocks.iter().enumerate() {
        let is_next = visit.last().is_some_and(|last| {
            let last = &recorded.blocks[*last as usize];
            place_of(last) == place_of(block) && last.start.backward_passes == block.start.backward_passes
        });
        if !is_next && !visit.is_empty() {
            pass.visit(&std::mem::take(&mut visit), &mut cast);
        }
        if is_computed(block) {
            visit.push(index as u32);
        } else if block.category == Category::Input {
            pass.add(Value { block: index as u32, width: Full });
        }
    }
    if !visit.is_empty() {
        pass.visit(&visit, &mut cast);
    }
    cast
}

/// Goes over the operations in order.
pub(super) struct Pass<'a, 'b> {
    pub(super) recorded: &'a Recorded<'b>,
    pub(super) places: &'a AutogradSites,
    pub(super) assumed: Width,
    pub(super) values: Vec<Value>,
    /// The type of each value, by block.
    pub(super) widths: Vec<Option<Width>>,
    /// The calls of modules that are running, with the number of values when they began.
    pub(super) open: Vec<(ContextId, usize)>,
    /// The first block since the last backward pass.
    pub(super) first: u32,
    /// `seq` of all events of nodes.
    pub(super) nodes: Vec<u32>,
}

impl Pass<'_, '_> {
    pub(super) fn add(&mut self, value: Value) {
        self.values.push(value);
        self.widths[value.block as usize] = Some(value.width);
    }

    pub(super) fn block(&self, index: u32) -> &BlockLifetime {
        &self.recorded.blocks[index as usize]
    }

    /// Whether a block is freed before the next one is allocated, and not by a node.
    pub(super) fn is_transient(&self, index: u32) -> bool {
        let next = self.recorded.blocks.get(index as usize + 1).map_or(u32::MAX, |next| next.allocated);
        self.block(index).freed < next && !self.recorded.is_freed_by_node(self.block(index))
    }

    /// The latest values at the time of a block, that are still allocated then.
    pub(super) fn latest(&self, until: usize, seq: u32) -> impl Iterator<Item = Value> {
        let latest = self.values[..until].iter().rev().take(LATEST_VALUES);
        latest.copied().filter(move |value| self.block(value.block).includes(seq))
    }

    /// Updates the running calls.
    pub(super) fn enter(&mut self, context: ContextId) {
        let mut calls = Vec::new();
        let mut at = context;
        while let Some(call) = self.recorded.definitions.nn_calls.get(&at) {
            calls.push(at);
            at = call.caller;
        }
        calls.reverse();
        let common = self.open.iter().zip(&calls).take_while(|((open, _), call)| open == *call).count();
        self.open.truncate(common);
        let now = self.values.len();
        self.open.extend(calls[common..].iter().map(|call| (*call, now)));
    }

    /// One operation, or several at one place: the blocks that it allocates.
    pub(super) fn visit(&mut self, blocks: &[u32], cast: &mut Cast) {
        let first = *self.block(blocks[0]);
        if self.block(self.first).start.backward_passes != first.start.backward_passes {
            self.first = blocks[0];
        }
        self.enter(first.start.context);
        let of_class = |context: &ContextId| {
            let call = self.recorded.definitions.nn_calls.get(context);
            call.map_or(AutocastType::Widest, |call| autocast_type_of_class(&call.class))
        };
        let without_nodes = AutogradSite { types: vec![of_class(&first.start.context)], ..AutogradSite::default() };
        let at = (self.recorded.table.python(first.start.stack), first.start.context);
        let place = self.places.places.get(&at).unwrap_or(&without_nodes);
        // An operation allocates its result before its workspace.
        let begins = blocks[0];
        let is_workspace =
            |index: &u32| *index != begins && place.has(AutocastType::Lower) && self.is_transient(*index);
        let (workspaces, blocks): (Vec<u32>, Vec<u32>) = blocks.iter().partition(|index| is_workspace(index));
        let blocks = &blocks[..];
        cast.workspaces.extend(workspaces);
        let largest = blocks.iter().map(|index| self.block(*index).requested()).max().unwrap_or(0);
        let is_other_type = |index: u32| {
            let size = self.block(index).requested();
            let is_indices = blocks.iter().any(|other| self.block(*other).requested() * 2 == size);
            place.has_other_types && (size <= largest / 4 || is_indices)
        };
        let results: Vec<u32> = blocks
            .iter()
            .copied()
            .filter(|index| {
                let size = self.block(*index).requested();
                size >= (largest / SMALLEST_RESULT).max(1) && !is_other_type(*index)
            })
            .collect();
        let Some(result) = results.last().copied() else { return };
        let inputs = self.inputs(place, blocks, result);
        let width = |index: u32| self.width(place, index, results.len(), &inputs);
        let widths: Vec<(u32, Width)> = results.iter().map(|index| (*index, width(*index))).collect();
        // Code outside modules that makes no graph, such as the assignment of targets, can compute from data of any
        // type.
        let is_outside = !self.places.places.contains_key(&at)
            && !self.recorded.definitions.nn_calls.contains_key(&first.start.context);
        if place.has(AutocastType::Unknown) || is_outside {
            cast.unknown.extend(blocks);
        }
        for (index, width) in &widths {
            if *width == Half {
                cast.halved.push(*index);
            }
        }
        let mut read = inputs.clone();
        // One line can compute several operations, of which a later one works in the other type.
        let other = match place.has(AutocastType::Lower) {
            true => Some(Full),
            false => (place.kind() == Kind::Mixed).then_some(Half),
        };
        if let Some(other) = other {
            let before = widths
                .iter()
                .filter(|(index, width)| *index != result && *width == other && self.is_saved(place, result, *index));
            read.extend(before.map(|(block, width)| Value { block: *block, width: *width }));
        }
        self.copy(place, blocks, result, &read, cast);
        for node in &place.nodes {
            let sizes = read.iter().map(|value| (self.block(value.block).requested(), value.width));
            cast.inputs.insert(*node, sizes.collect());
            if let Some((_, width)) = widths.last() {
                cast.results.insert(*node, *width);
            }
        }
        widths.into_iter().for_each(|(block, width)| self.add(Value { block, width }));
    }
}
