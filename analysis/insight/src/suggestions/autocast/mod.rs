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
//! cuDNN and cuBLAS for another type can be larger, smaller or missing: one replay has them as recorded, the other
//! none.

mod cast;
mod copies;
mod operands;
mod pass;
mod places;
#[cfg(test)]
mod tests;
mod types;

use std::collections::BTreeMap;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::ids::ContextId;

use super::change::{Assumed, Change, ChangedBlocks, Cost, Order, SuggestionRule};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::span::{self, Span};
use crate::passes::category::Category;
use crate::passes::lifetimes::{BlockLifetime, NEVER};
use crate::passes::phase::Phase;
use crate::rules::{AutocastType, RuleId, autocast_type};
use cast::{Cast, Width};
use places::{AutogradSites, is_weight_gradient};

/// It is computed where values of unknown operations, and parameters without gradients, are at most 3.03 % (1/33) of
/// the peak.
const SMALL_UNTYPED: u64 = 33;
/// It is computed where the workspaces of libraries are at most 10 % (1/10) of the peak.
const SMALL_WORKSPACES: u64 = 10;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::Autocast,
    action: "torch.autocast(\"cuda\", dtype=torch.bfloat16) around the forward pass and the loss",
    condition: "All parameters are float32 and get gradients. The operations that allocate nearly all values are \
                known, and values of unknown types change the new peak by at most a twentieth. The workspaces of \
                libraries are at most a tenth of the peak.",
    method: "Results of operations that autocast runs in bfloat16 halve, and those that take the type of their inputs \
             with them. An operation in the other type works on a copy of its input, which the backward pass needs \
             instead of the input. Copies of weights stay until autocast ends, and until the backward pass has used \
             them.",
    cost: Cost::Rounding,
    code: &[
        r#"with torch.autocast("cuda", dtype=torch.bfloat16):  # {call}"#,
        "    loss = loss_fn(model(inputs), labels)",
        "loss.backward()",
    ],
    link: "https://docs.pytorch.org/docs/stable/amp.html#torch.autocast",
    at_most: false,
    programs: &["convnext", "resnet"],
    find,
};

/// The effect of autocast, with both assumptions about types that the recording does not show.
#[derive(Debug)]
struct Autocast {
    half: Cast,
    full: Cast,
}

impl Autocast {
    /// `None` if the results of unknown operations add up to more than `most_unknown` bytes.
    fn of(recorded: &Recorded<'_>, most_unknown: u64) -> Option<Autocast> {
        let places = AutogradSites::of(recorded);
        let full = pass::find(recorded, &places, Width::Full);
        let is_known = unknown_bytes(recorded, &full) <= most_unknown;
        is_known.then(|| Autocast { half: pass::find(recorded, &places, Width::Half), full })
    }
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    if !is_in_float32(facts) {
        return None;
    }
    Some(Box::new(Autocast::of(&facts.recorded, facts.peak / SMALL_UNTYPED)?))
}

impl Change for Autocast {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::ValueTypes
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        let cast = match blocks.assumed {
            Assumed::Smallest => &self.half,
            Assumed::Largest => &self.full,
        };
        cast.apply(&facts.recorded, &facts.outermost, &mut blocks.spans);
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        // The effect of these rules on values in two types is unknown.
        matches!(
            other,
            RuleId::ScaledDotProductAttention
                | RuleId::ChunkedCrossEntropy
                | RuleId::NoGrad
                | RuleId::NoKvCache
                | RuleId::CheckpointLayers
                | RuleId::CheckpointOrNoGrad
                | RuleId::OffloadActivations
                | RuleId::Bfloat16Model
                | RuleId::OptimizerInBackward
        )
    }

    fn has_assumptions(&self) -> bool {
        true
    }
}

/// Whether the recording is a training in float32, without operations that autocast changes in other ways.
fn is_in_float32(facts: &Facts<'_>) -> bool {
    let recorded = &facts.recorded;
    let is_other =
        |block: &BlockLifetime| block.category == Category::AutocastCache || block.start.phase == Phase::Recompute;
    // Workspaces for another data type can be larger or smaller.
    let workspaces = || facts.bytes_at_peak(|category| category == Category::Workspace);
    facts.is_training()
        && facts.gathered.is_empty()
        && !facts.is_sharded()
        && recorded.until == NEVER
        && facts.is_float32(TensorKind::Parameter)
        && !recorded.blocks.iter().any(is_other)
        && workspaces() <= facts.peak / SMALL_WORKSPACES
        && frozen_bytes(facts) <= facts.peak / SMALL_UNTYPED
}

/// The bytes of parameters for which no backward pass computes a gradient of their size. Autocast makes copies of them
/// that the recording does not show.
fn frozen_bytes(facts: &Facts<'_>) -> u64 {
    let mut sizes: BTreeMap<u64, i64> = BTreeMap::new();
    let recorded = &facts.recorded;
    let parameters = recorded.blocks.iter().filter(|block| block.category == Category::Parameter);
    for block in parameters.filter(|block| block.includes(facts.peak_seq)) {
        *sizes.entry(block.requested()).or_default() += 1;
    }
    let parameters = sizes.clone();
    // In one pass each parameter has at most one gradient.
    let mut of_pass: BTreeMap<(u16, u64), i64> = BTreeMap::new();
    for block in recorded.blocks.iter().filter(|block| is_weight_gradient(recorded, block)) {
        *of_pass.entry((block.start.backward_passes, block.requested())).or_default() += 1;
    }
    for ((_, size), count) in of_pass {
        if let Some(left) = sizes.get_mut(&size) {
            *left = (*left).min(parameters[&size] - count);
        }
    }
    sizes.into_iter().map(|(size, left)| size * left.max(0) as u64).sum()
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
        block.start.phase == Phase::Backward
            && recorded.contexts().is_node(block.start.context)
            && is_unknown(block.start.context)
    });
    unknown.extend(backward);
    span::peak(&unknown, &recorded.settings).0
}
