//! The operations of a program, as autograd shows them: the nodes that each place made, and what they do.

use std::collections::HashMap;
use std::ops::Range;

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::{
    AutocastType, autocast_type, autocast_type_of_class, casts_logits, is_cross_entropy, makes_other_types,
    makes_views, promotes, saves_no_operand,
};
use crate::suggestions::recorded::Recorded;

/// One place of the program: the nodes that autograd made there.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct AutogradSite {
    pub(super) nodes: Vec<ContextId>,
    pub(super) types: Vec<AutocastType>,
    /// Some results are masks or indices.
    pub(super) has_other_types: bool,
    /// A float32 parameter is an operand.
    pub(super) has_parameter: bool,
    /// An operation reads several values and saves none of them.
    pub(super) hides_operands: bool,
    /// The number of operations that allocate their result.
    pub(super) operations: usize,
}

impl AutogradSite {
    pub(super) fn has(&self, of: AutocastType) -> bool {
        self.types.contains(&of)
    }

    pub(super) fn kind(&self) -> Kind {
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

/// The rule for the type of a place's results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Lower,
    Full,
    /// Operations of several types.
    Mixed,
    Widest,
    Unknown,
}

/// The places of all forward passes, and when their nodes ran.
#[derive(Debug, Default)]
pub(super) struct AutogradSites {
    pub(super) places: HashMap<(StackId, ContextId), AutogradSite>,
    /// By node: its events, as indices, and the blocks that it freed.
    pub(super) events: HashMap<ContextId, Vec<usize>>,
    pub(super) freed: HashMap<ContextId, Vec<u32>>,
}

/// Whether a backward pass makes this block as the gradient of a weight.
pub(super) fn is_weight_gradient(recorded: &Recorded<'_>, block: &BlockLifetime) -> bool {
    block.start.phase == Phase::Backward
        && (block.category == Category::Gradient || recorded.is_passing_weight_gradient(block))
}

impl AutogradSites {
    pub(super) fn of(recorded: &Recorded<'_>) -> AutogradSites {
        let mut found = AutogradSites::default();
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
            .map(|block| block.start.context)
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
    pub(super) fn run(&self, recorded: &Recorded<'_>, node: ContextId, seq: u32) -> Option<Range<usize>> {
        let events = self.events.get(&node)?;
        let first = *events.get(events.partition_point(|event| recorded.events[*event].seq <= seq))?;
        let later = recorded.events[first..].iter().position(|event| event.context != node);
        Some(first..later.map_or(recorded.events.len(), |length| first + length))
    }

    /// The blocks of `within` that a node freed.
    pub(super) fn freed(&self, node: ContextId, within: &Range<u32>) -> &[u32] {
        let all = self.freed.get(&node).map_or(&[][..], |blocks| blocks);
        let first = all.partition_point(|block| *block < within.start);
        let last = all.partition_point(|block| *block < within.end);
        &all[first..last]
    }
}
