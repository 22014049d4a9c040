//! Forward pass and loss under `torch.autocast("cuda", dtype=torch.bfloat16)`, for a training in float32.
//!
//! The operation that allocates a block decides its type ([`crate::rules::autocast_type`]): the autograd nodes that the
//! same code made, or the class of the module. An operation that keeps the type of its inputs has those that its nodes
//! save, and the latest value before it.
//!
//! An operation whose input has the other type works on a copy. If it saves its input, it saves the copy, and the input
//! is freed when the code has read it. Copies of weights stay until autocast ends, and for the backward pass if the
//! input needs a gradient. A node of the backward pass computes in the type of its operation. The gradient is then cast
//! to the type of the input.
//!
//! Where the recording does not show a type, both are replayed. No peak is announced if they differ. The workspaces of
//! cuDNN and cuBLAS for another type can be larger, smaller or missing: one replay has them as recorded, the other none.

use std::collections::HashMap;
use std::ops::Range;

use memtrace_trace::ids::{ContextId, StackId};

use super::batch::passing_end;
use super::evaluation::outermost_calls;
use super::reads::read_until;
use super::recorded::Recorded;
use super::span::{self, Key, Span, after, at, before};
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::{
    AutocastType, autocast_type, autocast_type_of_class, casts_logits, is_cross_entropy, makes_other_types,
    makes_views, promotes, saves_no_operand,
};

/// A result is at least as large as one in this many parts of the largest block of its operation. Others are statistics.
const SMALLEST_RESULT: u64 = 16;
/// An input is at least as large as one in this many parts of the result. Others are indices or labels.
const SMALLEST_INPUT: u64 = 64;
/// The number of values that a product without weights reads.
const FACTORS: usize = 2;
/// How many values before an operation are searched for its inputs.
const LATEST_VALUES: usize = 64;

/// The floating-point type of a value under autocast.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Width {
    /// bfloat16.
    Half,
    /// float32.
    Full,
}

use Width::{Full, Half};

/// What autograd shows about one place of the program: the nodes that it made.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Place {
    nodes: Vec<ContextId>,
    types: Vec<AutocastType>,
    /// Some results are masks or indices.
    has_other_types: bool,
    /// A float32 parameter is an operand.
    has_parameter: bool,
    /// An operation reads several values and saves none of them.
    hides_operands: bool,
    /// The number of operations that allocate their result.
    operations: usize,
}

impl Place {
    fn has(&self, of: AutocastType) -> bool {
        self.types.contains(&of)
    }

    fn kind(&self) -> Kind {
        let is_float32 = self.has(AutocastType::Float32) || self.has(AutocastType::Float32WithoutInputs);
        match (self.has(AutocastType::Lower), is_float32) {
            _ if self.has(AutocastType::Unknown) => Kind::Unknown,
            _ if self.has(AutocastType::Parameters) => Kind::Full,
            (true, false) => Kind::Lower,
            (false, true) if !self.has(AutocastType::Widest) => Kind::Full,
            (false, false) => Kind::Widest,
            _ => Kind::Mixed,
        }
    }
}

/// The places of all forward passes, and when their nodes ran.
#[derive(Debug, Default)]
struct Places {
    places: HashMap<(StackId, ContextId), Place>,
    /// By node: its events, as indices, and the blocks that it freed.
    events: HashMap<ContextId, Vec<usize>>,
    freed: HashMap<ContextId, Vec<u32>>,
}

/// Whether a backward pass makes this block as the gradient of a weight.
pub(super) fn is_weight_gradient(recorded: &Recorded<'_>, block: &BlockLifetime) -> bool {
    block.phase == Phase::Backward
        && (block.category == Category::Gradient || recorded.is_passing_weight_gradient(block))
}

impl Places {
    fn of(recorded: &Recorded<'_>) -> Places {
        let mut found = Places::default();
        let contexts = recorded.contexts();
        for (index, event) in recorded.events.iter().enumerate().filter(|(_, event)| contexts.is_node(event.context)) {
            found.events.entry(event.context).or_default().push(index);
            if !event.allocates {
                found.freed.entry(event.context).or_default().push(event.block);
            }
        }
        found.freed.values_mut().for_each(|blocks| blocks.sort_unstable());
        let mut with_parameter: Vec<ContextId> = recorded
            .blocks
            .iter()
            .filter(|block| is_weight_gradient(recorded, block))
            .map(|block| block.context)
            .collect();
        with_parameter.sort_unstable();
        with_parameter.dedup();
        for (index, context) in recorded.definitions.contexts.iter().enumerate() {
            let id = ContextId(index as u32);
            if context.node.is_empty() || &*context.node == "AccumulateGrad" || context.forward.is_none() {
                continue;
            }
            let at = (recorded.table.python(context.forward), context.module);
            let place = found.places.entry(at).or_default();
            place.nodes.push(id);
            let of = autocast_type(&context.node);
            place.types.push(of);
            place.has_other_types |= makes_other_types(&context.node);
            place.has_parameter |= promotes(&context.node) && with_parameter.binary_search(&id).is_ok();
            place.hides_operands |= saves_no_operand(&context.node);
            place.operations += usize::from(!makes_views(&context.node));
            let call = recorded.definitions.nn_calls.get(&context.module);
            if call.is_some_and(|call| autocast_type_of_class(&call.class) == AutocastType::Unknown) {
                place.types.push(AutocastType::Unknown);
            }
        }
        let name = |node: &ContextId| &*recorded.definitions.contexts[node.index()].node;
        for ((stack, _), place) in &mut found.places {
            let mut frames = recorded.definitions.walk(*stack).filter_map(|(_, frame)| frame);
            if !is_cross_entropy(place.nodes.iter().map(name)) || frames.any(casts_logits) {
                continue;
            }
            for of in place.types.iter_mut().filter(|of| **of == AutocastType::Float32WithoutInputs) {
                *of = AutocastType::Widest;
            }
        }
        found
    }

    /// The events of a node's first run after `seq`.
    fn run(&self, recorded: &Recorded<'_>, node: ContextId, seq: u32) -> Option<Range<usize>> {
        let events = self.events.get(&node)?;
        let first = *events.get(events.partition_point(|event| recorded.events[*event].seq <= seq))?;
        let later = recorded.events[first..].iter().position(|event| event.context != node);
        Some(first..later.map_or(recorded.events.len(), |length| first + length))
    }

    /// The blocks of `within` that a node freed.
    fn freed(&self, node: ContextId, within: &Range<u32>) -> &[u32] {
        let all = self.freed.get(&node).map_or(&[][..], |blocks| blocks);
        let first = all.partition_point(|block| *block < within.start);
        let last = all.partition_point(|block| *block < within.end);
        &all[first..last]
    }
}

/// A result of an operation, or an input of the model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Value {
    block: u32,
    width: Width,
}

/// What autocast changes, with both assumptions about types that the recording does not show.
#[derive(Debug)]
pub(super) struct Autocast {
    half: Cast,
    full: Cast,
}

impl Autocast {
    /// `None` if the results of unknown operations add up to more than `most_unknown` bytes.
    pub(super) fn find(recorded: &Recorded<'_>, most_unknown: u64) -> Option<Autocast> {
        let places = Places::of(recorded);
        let full = Cast::find(recorded, &places, Full);
        let is_known = unknown_bytes(recorded, &full) <= most_unknown;
        is_known.then(|| Autocast { half: Cast::find(recorded, &places, Half), full })
    }

    /// Changes the spans of the recorded blocks.
    pub(super) fn apply(&self, recorded: &Recorded<'_>, assumed: Width, spans: &mut Vec<Span>) {
        let cast = match assumed {
            Half => &self.half,
            Full => &self.full,
        };
        cast.apply(recorded, spans);
    }
}

/// The highest sum of the results of unknown operations, in forward and backward passes.
fn unknown_bytes(recorded: &Recorded<'_>, cast: &Cast) -> u64 {
    let all = recorded.spans();
    let mut unknown: Vec<Span> = cast.unknown.iter().map(|index| all[*index as usize]).collect();
    // The nodes of a graph that a backward pass records have no forward pass.
    let is_unknown = |context: ContextId| {
        recorded.definitions.contexts.get(context.index()).is_none_or(|node| {
            &*node.node != "AccumulateGrad"
                && (node.forward.is_none()
                    || recorded.table.facts(node.forward).in_engine
                    || autocast_type(&node.node) == AutocastType::Unknown)
        })
    };
    let backward = all.iter().filter(|span| {
        let block = &recorded.blocks[span.block as usize];
        block.phase == Phase::Backward && recorded.contexts().is_node(block.context) && is_unknown(block.context)
    });
    unknown.extend(backward);
    span::peak(&unknown, &recorded.settings).0
}

/// What autocast changes.
#[derive(Debug, Default)]
struct Cast {
    /// Blocks in bfloat16.
    halved: Vec<u32>,
    /// Copies.
    copies: Vec<Span>,
    /// Blocks that no node saves any more, and how long an operation in their own type saves them.
    unsaved: HashMap<u32, Key>,
    /// How long blocks in bfloat16 are saved by operations in bfloat16.
    saved: HashMap<u32, Key>,
    /// Blocks of unknown operations.
    unknown: Vec<u32>,
    /// Workspaces: blocks that an operation in bfloat16 allocates and frees before the next allocation.
    workspaces: Vec<u32>,
    /// Whether workspaces for bfloat16 are assumed to be missing.
    drops_workspaces: bool,
    /// By node: the requested sizes of its inputs and their types; and the type of its result.
    inputs: HashMap<ContextId, Vec<(u64, Width)>>,
    results: HashMap<ContextId, Width>,
}

impl Cast {
    /// Finds the types of all values. Where the recording does not show the type of a value, it is `assumed`.
    fn find(recorded: &Recorded<'_>, places: &Places, assumed: Width) -> Cast {
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
            block.phase == Phase::Forward && !is_other
        };
        let mut visit: Vec<u32> = Vec::new();
        let place_of = |block: &BlockLifetime| (recorded.table.python(block.stack), block.context);
        for (index, block) in recorded.blocks.iter().enumerate() {
            let is_next = visit.last().is_some_and(|last| {
                let last = &recorded.blocks[*last as usize];
                place_of(last) == place_of(block) && last.backward_passes == block.backward_passes
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

    /// Applies the changes to the spans of the recorded blocks.
    fn apply(&self, recorded: &Recorded<'_>, spans: &mut Vec<Span>) {
        let mut reads: HashMap<u32, Key> = HashMap::new();
        if !self.unsaved.is_empty() {
            for call in outermost_calls(recorded) {
                let ends = read_until(recorded, &call);
                reads.extend(call.blocks.iter().copied().zip(ends));
            }
        }
        for (index, saved) in &self.unsaved {
            let next = recorded.blocks.get(*index as usize + 1).map_or(Key::MAX, |next| after(next.allocated));
            let read = reads.get(index).copied().unwrap_or(next);
            let saved = self.saved.get(index).copied().unwrap_or(0).max(*saved);
            spans[*index as usize].end_by(read.max(saved));
        }
        for index in &self.halved {
            spans[*index as usize].requested = spans[*index as usize].requested.div_ceil(2);
        }
        for index in self.workspaces.iter().filter(|_| self.drops_workspaces) {
            spans[*index as usize].vanish();
        }
        let mut added = Vec::new();
        let mut latest = Half;
        for (index, block) in recorded.blocks.iter().enumerate() {
            if block.phase != Phase::Backward || !recorded.contexts().is_node(block.context) {
                continue;
            }
            let Some(name) = recorded.definitions.contexts.get(block.context.index()).map(|of| &*of.node) else {
                continue;
            };
            let span = &mut spans[index];
            let half = span.requested.div_ceil(2);
            let passes = passing_end(recorded, block).clamp(span.start + 1, span.end.max(span.start + 1));
            let is_weight = is_weight_gradient(recorded, block);
            let input = || {
                let inputs = self.inputs.get(&block.context);
                let same = inputs.and_then(|all| all.iter().rev().find(|(size, _)| *size == block.requested()));
                same.or_else(|| inputs.and_then(|all| all.last())).map_or(Half, |(_, width)| *width)
            };
            match autocast_type(name) {
                // Cast to the type of the parameter when the node is done.
                AutocastType::Lower if is_weight => added.push(Span { end: passes, requested: half, ..*span }),
                // Partial sums are in float32 anyway. Others are workspaces.
                AutocastType::Lower if block.freed_context == block.context && self.drops_workspaces => span.vanish(),
                AutocastType::Lower if block.freed_context == block.context => {}
                AutocastType::Lower => {
                    latest = input();
                    match latest {
                        Half => span.requested = half,
                        Full => added.push(Span { end: passes, requested: half, ..*span }),
                    }
                }
                AutocastType::Float32 | AutocastType::Float32WithoutInputs if !is_weight => {
                    latest = input();
                    if latest == Half && block.freed_context != block.context && span.exists() {
                        added.push(Span { start: passes - 1, end: span.end.max(passes), requested: half, ..*span });
                        span.end = passes;
                    }
                }
                AutocastType::Widest if !is_weight => {
                    latest = self.results.get(&block.context).copied().unwrap_or(latest);
                    if latest == Half {
                        span.requested = half;
                    }
                }
                _ => {}
            }
        }
        spans.extend(added);
        spans.extend(&self.copies);
    }
}

/// Goes over the operations in order.
struct Pass<'a, 'b> {
    recorded: &'a Recorded<'b>,
    places: &'a Places,
    assumed: Width,
    values: Vec<Value>,
    /// The type of each value, by block.
    widths: Vec<Option<Width>>,
    /// The calls of modules that are running, with the number of values when they began.
    open: Vec<(ContextId, usize)>,
    /// The first block since the last backward pass.
    first: u32,
    /// `seq` of all events of nodes.
    nodes: Vec<u32>,
}

impl Pass<'_, '_> {
    fn add(&mut self, value: Value) {
        self.values.push(value);
        self.widths[value.block as usize] = Some(value.width);
    }

    fn block(&self, index: u32) -> &BlockLifetime {
        &self.recorded.blocks[index as usize]
    }

    /// Whether a block is freed before the next one is allocated, and not by a node.
    fn is_transient(&self, index: u32) -> bool {
        let next = self.recorded.blocks.get(index as usize + 1).map_or(u32::MAX, |next| next.allocated);
        self.block(index).freed < next && !self.recorded.is_freed_by_node(self.block(index))
    }

    /// The latest values at the time of a block, that are still allocated then.
    fn latest(&self, until: usize, seq: u32) -> impl Iterator<Item = Value> {
        let latest = self.values[..until].iter().rev().take(LATEST_VALUES);
        latest.copied().filter(move |value| self.block(value.block).includes(seq))
    }

    /// Updates the running calls.
    fn enter(&mut self, context: ContextId) {
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
    fn visit(&mut self, blocks: &[u32], cast: &mut Cast) {
        let first = *self.block(blocks[0]);
        if self.block(self.first).backward_passes != first.backward_passes {
            self.first = blocks[0];
        }
        self.enter(first.context);
        let of_class = |context: &ContextId| {
            let call = self.recorded.definitions.nn_calls.get(context);
            call.map_or(AutocastType::Widest, |call| autocast_type_of_class(&call.class))
        };
        let without_nodes = Place { types: vec![of_class(&first.context)], ..Place::default() };
        let at = (self.recorded.table.python(first.stack), first.context);
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
        if place.has(AutocastType::Unknown) {
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

    /// The values that the operation reads.
    fn inputs(&self, place: &Place, blocks: &[u32], result: u32) -> Vec<Value> {
        let first = self.block(blocks[0]).allocated;
        let value_of = |block: u32| self.widths[block as usize].map(|width| Value { block, width });
        let before = self.first..blocks[0];
        let mut inputs: Vec<Value> = Vec::new();
        let smallest = self.block(result).requested() / SMALLEST_INPUT;
        let is_large = |value: &Value| self.block(value.block).requested() >= smallest;
        for node in &place.nodes {
            let freed = self.places.freed(*node, &before).iter().filter_map(|index| value_of(*index));
            inputs.extend(freed.filter(is_large));
        }
        // What the operation saved is allocated when its node runs. The latest such value is an input if the nodes do not
        // show all of them.
        let is_saved = |block: u32| self.is_saved(place, result, block);
        let weight = self.weight(place, result);
        let is_product = place.has(AutocastType::Lower) && weight.is_none();
        let size = weight.and_then(|(_, input)| input).map(|input| self.block(input).requested());
        let is_like = |value: &Value| size.is_none_or(|size| self.block(value.block).requested() == size);
        let is_of_lower = |block: u32| {
            let mut lower = place.nodes.iter().zip(&place.types).filter(|(_, of)| **of == AutocastType::Lower);
            lower.any(|(node, _)| *node == self.block(block).freed_context)
        };
        let own = blocks.iter().filter(|block| **block != result);
        let own = own.filter(|block| if is_product { is_saved(**block) } else { is_of_lower(**block) }).count();
        let shown = inputs.len() + own;
        if shown < if is_product { FACTORS } else { 1 } {
            let mut latest = self.latest(self.values.len(), first).filter(is_large);
            let found = match place.has(AutocastType::Lower) {
                true => latest.find(|value| is_saved(value.block) && is_like(value)),
                false => latest.next().map(|value| self.argument(value, first)),
            };
            inputs.extend(found.filter(|value| !inputs.contains(value)));
        }
        inputs.sort_by_key(|value| value.block);
        inputs.dedup();
        inputs
    }

    /// The latest value before an operation. If it is older than the running call, it is an argument, or any other value
    /// that a variable of the code around the call keeps is.
    fn argument(&self, latest: Value, seq: u32) -> Value {
        let mut begun = self.open.iter().rev().map(|(_, begun)| *begun);
        let begins = |number: usize| self.values.get(number).map_or(u32::MAX, |value| value.block);
        if begun.next().is_none_or(|call| latest.block >= begins(call)) {
            return latest;
        }
        let around = begins(begun.next().unwrap_or(0));
        let size = self.block(latest.block).requested();
        let is_variable = |value: &Value| {
            let block = self.block(value.block);
            value.block >= around
                && block.requested() >= size / SMALLEST_INPUT
                && !self.recorded.is_freed_by_node(block)
        };
        let mut variables = self.latest(self.values.len(), seq).filter(is_variable);
        let is_known = variables.all(|other| other.width == latest.width);
        Value { width: if is_known { latest.width } else { self.assumed }, ..latest }
    }

    /// Whether a block is still allocated when the nodes of an operation that save inputs begin.
    fn is_saved(&self, place: &Place, result: u32, block: u32) -> bool {
        let saves = place.nodes.iter().zip(&place.types);
        let saves = saves.filter(|(_, of)| matches!(of, AutocastType::Lower | AutocastType::Float32));
        let runs = saves.filter_map(|(node, _)| self.places.run(self.recorded, *node, self.block(result).allocated));
        let begins = runs.map(|run| self.recorded.events[run.start].seq).min();
        begins.is_none_or(|seq| self.block(block).freed >= seq)
    }

    /// The type of one of the results.
    fn width(&self, place: &Place, index: u32, results: usize, inputs: &[Value]) -> Width {
        let block = self.block(index);
        // What an operation in float32 saves as its result is allocated when its node runs.
        let is_float32_result = |pass: &Self| {
            let float32 = place.nodes.iter().zip(&place.types);
            let mut float32 =
                float32.filter(|(_, of)| matches!(of, AutocastType::Float32 | AutocastType::Float32WithoutInputs));
            float32.any(|(node, _)| {
                let run = pass.places.run(pass.recorded, *node, block.allocated);
                run.is_none_or(|run| block.freed >= pass.recorded.events[run.start].seq)
            })
        };
        let widest = || inputs.iter().map(|value| value.width).max().unwrap_or(self.assumed);
        let hides = place.hides_operands || place.operations < results;
        match place.kind() {
            Kind::Unknown => self.assumed,
            Kind::Full => Full,
            Kind::Lower => Half,
            Kind::Mixed => {
                let freed_by = place.nodes.iter().zip(&place.types).find(|(node, _)| **node == block.freed_context);
                match freed_by.map(|(_, of)| *of) {
                    Some(AutocastType::Float32 | AutocastType::Float32WithoutInputs) => Full,
                    Some(AutocastType::Lower) => Half,
                    // A program can cast logits to float32 before, which shows nowhere in a recording in float32.
                    Some(AutocastType::Widest) => widest().max(self.assumed),
                    None if place.has(AutocastType::Lower) && !is_float32_result(self) => Half,
                    _ => self.assumed,
                }
            }
            Kind::Widest if place.has_parameter => Full,
            Kind::Widest => match widest() {
                Full => Full,
                Half if !hides => Half,
                Half => self.other_operand(block, inputs).unwrap_or(Half),
            },
        }
    }

    /// The type of the other operand of an addition, or of another operation that saves none of its inputs: an earlier
    /// result of the same code, or what the code around was called with. `None` if there is none of the size.
    fn other_operand(&self, result: &BlockLifetime, inputs: &[Value]) -> Option<Width> {
        let (call, begun) = self.open.last().copied()?;
        let is_like =
            |value: &Value| self.block(value.block).requested() == result.requested() && !inputs.contains(value);
        let own = self.latest(self.values.len(), result.allocated);
        let own = own.filter(|value| self.block(value.block).context == call);
        let since = self.values.get(begun).map_or(u32::MAX, |value| value.block);
        let own = own.filter(|value| value.block >= since).find(is_like);
        let argument = self.latest(begun, result.allocated).find(is_like);
        let around = self.open.iter().rev().nth(1).map_or(0, |(_, begun)| *begun);
        let outer = self.latest(around, result.allocated).find(is_like);
        let mut widths = [own, argument, outer].into_iter().flatten().map(|value| value.width);
        let first = widths.next()?;
        Some(if widths.all(|width| width == first) { first } else { self.assumed })
    }

    /// The gradient of the weight of a linear layer or a convolution, and that of its input if the input needs one.
    fn weight(&self, place: &Place, result: u32) -> Option<(u32, Option<u32>)> {
        let lower = place.nodes.iter().zip(&place.types).filter(|(_, of)| **of == AutocastType::Lower);
        let mut found = None;
        for (node, _) in lower {
            let Some(run) = self.places.run(self.recorded, *node, self.block(result).allocated) else { continue };
            let allocated = self.recorded.events[run].iter().filter(|event| event.allocates).map(|event| event.block);
            let allocated: Vec<u32> = allocated.collect();
            let is_weight = |index: &&u32| is_weight_gradient(self.recorded, self.block(**index));
            let weight = allocated.iter().filter(is_weight).max_by_key(|index| self.block(**index).requested());
            let Some(weight) = weight else { continue };
            let is_input = |index: &u32| {
                let block = self.block(*index);
                !is_weight_gradient(self.recorded, block) && block.freed_context != *node
            };
            let inputs = allocated.iter().copied().filter(is_input);
            found = Some((*weight, inputs.max_by_key(|index| self.block(*index).requested())));
        }
        found
    }

    /// Adds the copies that the operation makes of its inputs and of its weight.
    fn copy(&self, place: &Place, blocks: &[u32], result: u32, inputs: &[Value], cast: &mut Cast) {
        let recorded = self.recorded;
        let begins = self.block(blocks[0]).allocated;
        let ended = after(self.block(result).allocated);
        let done = |node: ContextId| {
            let run = self.places.run(recorded, node, self.block(result).allocated)?;
            Some(after(recorded.events[run.end - 1].seq))
        };
        let copy = |block: u32, number: usize, requested: u64, end: Key| Span {
            start: before(begins, number),
            end: end.max(ended),
            requested,
            block,
            stream_pool: self.block(block).stream_pool,
        };
        let of_type = |of: AutocastType| place.nodes.iter().zip(&place.types).find(|(_, t)| **t == of).map(|(n, _)| *n);
        if let Some(node) = of_type(AutocastType::Lower) {
            let weight = self.weight(place, result);
            let done = done(node);
            for (number, value) in inputs.iter().enumerate() {
                match value.width {
                    Full => {
                        let size = self.block(value.block).requested().div_ceil(2);
                        cast.copies.push(copy(value.block, number, size, done.unwrap_or(0)));
                        if self.block(value.block).freed_context == node {
                            cast.unsaved.entry(value.block).or_insert(0);
                        }
                    }
                    Half => {
                        let saved = cast.saved.entry(value.block).or_insert(0);
                        *saved = (*saved).max(done.unwrap_or(0));
                    }
                }
            }
            if let Some((weight, input)) = weight {
                let size = self.block(weight).requested().div_ceil(2);
                let ends = self.backward_begins(begins);
                let end = if input.is_some() { ends.max(done.unwrap_or(0)) } else { ends };
                cast.copies.push(copy(weight, inputs.len(), size, end));
            }
        } else if let Some(node) = of_type(AutocastType::Float32) {
            for (number, value) in inputs.iter().enumerate().filter(|(_, value)| value.width == Half) {
                let size = self.block(value.block).requested();
                cast.copies.push(copy(value.block, number, size, done(node).unwrap_or(0)));
                if self.block(value.block).freed_context == node {
                    cast.unsaved.entry(value.block).or_insert(0);
                }
            }
        } else if of_type(AutocastType::Float32WithoutInputs).is_some() {
            for (number, value) in inputs.iter().enumerate().filter(|(_, value)| value.width == Half) {
                cast.copies.push(copy(value.block, number, self.block(value.block).requested(), 0));
            }
        }
    }

    /// When the first node after an event runs.
    fn backward_begins(&self, seq: u32) -> Key {
        self.nodes.get(self.nodes.partition_point(|node| *node <= seq)).map_or(Key::MAX, |node| at(*node))
    }
}

/// What decides the type of a place's results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Lower,
    Full,
    /// Operations of several types.
    Mixed,
    Widest,
    Unknown,
}

#[cfg(test)]
mod tests {
    use memtrace_trace::file::{Context, Definitions, Frame, StackNode};
    use memtrace_trace::ids::FrameId;

    use super::*;
    use crate::passes::lifetimes::{BlockLifetimes, NEVER};
    use crate::passes::stacks::StackTable;
    use memtrace_replay::AllocatorSettings;

    const MIB: u64 = 1 << 20;
    const NONE: ContextId = ContextId::NONE;

    /// A line of the program, and the node that it makes. Both have this number.
    fn definitions(nodes: &[&str]) -> Definitions {
        let mut definitions = Definitions {
            frames: vec![Frame::default()],
            stacks: vec![StackNode { parent: StackId::NONE, frame: FrameId::NONE }],
            contexts: vec![Context::default()],
            ..Definitions::default()
        };
        for (number, node) in (1..).zip(nodes) {
            let filename = "model.py".into();
            definitions.frames.push(Frame { filename, line: number, ..Frame::default() });
            definitions.stacks.push(StackNode { parent: StackId::NONE, frame: FrameId(number) });
            definitions.contexts.push(Context { node: (*node).into(), forward: StackId(number), module: NONE });
        }
        definitions
    }

    #[derive(Default)]
    struct Program {
        blocks: Vec<BlockLifetime>,
        seq: u32,
        passes: u16,
    }

    impl Program {
        fn alloc(&mut self, mib: u64, phase: Phase, category: Category, line: u32, node: u32) -> usize {
            self.seq += 1;
            let mut block = BlockLifetime::of_size(self.seq, mib * MIB);
            (block.phase, block.category, block.step, block.backward_passes) = (phase, category, 0, self.passes);
            (block.stack, block.context) = (StackId(line), ContextId(node));
            self.blocks.push(block);
            self.blocks.len() - 1
        }

        /// A result of the line with this number.
        fn result(&mut self, mib: u64, line: u32) -> usize {
            self.alloc(mib, Phase::Forward, Category::Activation, line, 0)
        }

        fn free(&mut self, block: usize, node: u32) {
            self.seq += 1;
            (self.blocks[block].freed, self.blocks[block].freed_context) = (self.seq, ContextId(node));
        }

        fn with<T>(&self, nodes: &[&str], check: impl FnOnce(&Recorded<'_>) -> T) -> T {
            let definitions = definitions(nodes);
            let table = StackTable::new(&definitions);
            let lifetimes = BlockLifetimes {
                blocks: self.blocks.clone(),
                stream_pools: vec![(0, 0)],
                is_whole: true,
                ..BlockLifetimes::default()
            };
            check(&Recorded::new(&lifetimes, &definitions, &table, AllocatorSettings::default(), None, None))
        }
    }

    /// Two linear layers with a normalization between them, of which the second one needs gradients of its input.
    fn normalized() -> Program {
        let mut program = Program::default();
        program.alloc(100, Phase::Data, Category::Input, 0, 0);
        let [first, norm, second] = [1, 2, 3].map(|line| program.result(100, line));
        program.free(second, 0);
        program.passes = 1;
        let of_norm = program.alloc(100, Phase::Backward, Category::AutogradDetail, 0, 3);
        program.alloc(10, Phase::Backward, Category::Gradient, 0, 3);
        program.free(norm, 3);
        let of_first = program.alloc(100, Phase::Backward, Category::AutogradDetail, 0, 2);
        program.free(first, 2);
        program.free(of_norm, 2);
        program.alloc(10, Phase::Backward, Category::Gradient, 0, 1);
        program.free(of_first, 1);
        program
    }
    const NODES: [&str; 3] = ["AddmmBackward0", "NativeLayerNormBackward0", "AddmmBackward0"];

    #[test]
    fn an_operation_in_the_other_type_saves_a_copy_of_its_input() {
        let program = normalized();
        program.with(&NODES, |recorded| {
            let cast = Cast::find(recorded, &Places::of(recorded), Full);
            assert_eq!(cast.halved, [1, 3], "the linear layers");
            let mut copies: Vec<(u32, u64)> = cast.copies.iter().map(|c| (c.block, c.requested / MIB)).collect();
            copies.sort_unstable();
            // Input, result of the first layer in float32, result of the normalization, and both weights.
            assert_eq!(copies, [(0, 50), (1, 100), (2, 50), (5, 5), (7, 5)]);
            let mut unsaved: Vec<u32> = cast.unsaved.keys().copied().collect();
            unsaved.sort_unstable();
            assert_eq!(unsaved, [1, 2]);
            let weight = |block: u32| cast.copies.iter().find(|copy| copy.block == block).map(|copy| copy.end);
            let backward = recorded.events.iter().find(|event| event.context == ContextId(3)).expect("a node").seq;
            assert_eq!(weight(7), Some(at(backward)), "no gradient of the input: the copy ends with autocast");
            assert!(weight(5) > weight(7), "the backward pass needs the copy");
        });
    }

    #[test]
    fn a_gradient_has_the_type_of_the_operation_and_then_that_of_the_input() {
        let program = normalized();
        program.with(&NODES, |recorded| {
            let mut spans = recorded.spans();
            Cast::find(recorded, &Places::of(recorded), Full).apply(recorded, &mut spans);
            let of = |block: u32| {
                let all = spans.iter().filter(|span| span.block == block && span.exists());
                let mut all: Vec<(Key, u64)> = all.map(|span| (span.start, span.requested / MIB)).collect();
                all.sort_unstable();
                all.into_iter().map(|(_, mib)| mib).collect::<Vec<u64>>()
            };
            // The gradient of what the normalization computed is cast to float32, that of its input to bfloat16.
            assert_eq!(of(4), [50, 100]);
            assert_eq!(of(6), [100, 50]);
            // A copy of the weight in the forward pass, then its gradient in both types.
            assert_eq!(of(5), [5, 5, 10]);
        });
    }

    #[test]
    fn workspaces_for_bfloat16_are_unknown() {
        let mut program = Program::default();
        program.alloc(100, Phase::Data, Category::Input, 0, 0);
        let result = program.result(100, 1);
        let workspace = program.result(300, 1);
        program.free(workspace, 0);
        program.passes = 1;
        let of_result = program.alloc(100, Phase::Backward, Category::AutogradDetail, 0, 2);
        program.free(result, 0);
        let in_backward = program.alloc(200, Phase::Backward, Category::AutogradDetail, 0, 1);
        program.free(in_backward, 1);
        program.alloc(10, Phase::Backward, Category::Gradient, 0, 1);
        program.free(of_result, 1);
        program.with(&["ConvolutionBackward0", "ReluBackward0"], |recorded| {
            let sizes = |assumed| {
                let mut spans = recorded.spans();
                let cast = Cast::find(recorded, &Places::of(recorded), assumed);
                assert_eq!(cast.halved, [result as u32], "the workspace is no result");
                cast.apply(recorded, &mut spans);
                let of = |block: usize| if spans[block].exists() { spans[block].requested / MIB } else { 0 };
                [of(workspace), of(in_backward)]
            };
            assert_eq!((sizes(Full), sizes(Half)), ([300, 200], [0, 0]));
        });
    }

    #[test]
    fn unknown_operations_are_counted() {
        let program = normalized();
        program.with(&NODES, |recorded| {
            assert_eq!(unknown_bytes(recorded, &Cast::find(recorded, &Places::of(recorded), Full)), 0)
        });
        let nodes = ["AddmmBackward0", "FusedNormBackward", "AddmmBackward0"];
        // The result, and after it the gradient of the input.
        program.with(&nodes, |recorded| {
            assert!(Autocast::find(recorded, 99 * MIB).is_none() && Autocast::find(recorded, 100 * MIB).is_some())
        });
    }

    #[test]
    fn the_softmax_of_a_cross_entropy_has_the_type_of_the_logits_or_one_that_is_not_shown() {
        let mut program = Program::default();
        program.alloc(1, Phase::Data, Category::Input, 0, 0);
        let logits = program.result(100, 1);
        let softmax = program.result(100, 2);
        program.free(logits, 0);
        program.passes = 1;
        let gradient = program.alloc(100, Phase::Backward, Category::AutogradDetail, 0, 3);
        let of_logits = program.alloc(100, Phase::Backward, Category::AutogradDetail, 0, 2);
        program.free(softmax, 2);
        program.free(gradient, 2);
        program.alloc(10, Phase::Backward, Category::Gradient, 0, 1);
        program.free(of_logits, 1);
        let nodes = ["MmBackward0", "LogSoftmaxBackward0", "NllLossBackward0"];
        let halved = |assumed, is_one_function: bool| {
            let mut definitions = definitions(&nodes);
            if is_one_function {
                definitions.contexts[3].forward = StackId(2);
            }
            let table = StackTable::new(&definitions);
            let lifetimes = BlockLifetimes { blocks: program.blocks.clone(), ..BlockLifetimes::default() };
            let settings = AllocatorSettings::default();
            let recorded = Recorded::new(&lifetimes, &definitions, &table, settings, None, None);
            assert_eq!(recorded.until, NEVER);
            Cast::find(&recorded, &Places::of(&recorded), assumed).halved
        };
        assert_eq!(halved(Full, true), [1]);
        assert_eq!(halved(Half, true), [1, 2]);
        assert_eq!(halved(Half, false), [1], "log_softmax of its own");
    }
}
