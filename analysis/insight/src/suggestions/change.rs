//! The interface of a suggestion: the rule that finds its change in a recording, and the change.

use std::collections::HashSet;
use std::fmt::Debug;

use memtrace_trace::ids::{ContextId, StackId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::facts::Facts;
use super::recorded::span::{self, Span};
use crate::passes::phase::Phase;
use crate::rules::RuleId;

/// The phases without a backward pass.
pub(super) const FORWARD_ONLY: &[Phase] = &[Phase::Eval, Phase::Generate, Phase::Rollout];
/// The phases in which only gradients, optimizer state and what belongs to them lower the peak.
pub(super) const WITH_STATE: &[Phase] = &[Phase::Eval, Phase::Generate, Phase::Rollout, Phase::Optimizer];

/// A way to lower a peak: its texts, and how to find out whether a recording allows it.
///
/// The new peak comes from a replay of the recorded blocks with the change. A change that does not lower the peak there
/// is not reported.
#[derive(Debug)]
pub struct SuggestionRule {
    /// The stable id in reports.
    pub id: RuleId,
    /// The action, in the program's terms. Names in braces are placeholders, see [`Change::values`].
    pub action: &'static str,
    /// When it is considered.
    pub condition: &'static str,
    /// The change that the replay makes.
    pub method: &'static str,
    /// The cost beside memory, which decides the order.
    pub cost: Cost,
    /// The code that makes the change: lines of Python with placeholders of the action, `{call}` for the line that
    /// calls the model, and `{classes}` for the classes of modules.
    pub code: &'static [&'static str],
    /// A page about it; empty for none.
    pub link: &'static str,
    /// Whether the new peak is an upper bound, because the run does not show the exact value.
    pub at_most: bool,
    /// The programs of `tests/programs/suggestions` for which it is suggested.
    pub programs: &'static [&'static str],
    /// The change, if the recording allows it.
    pub find: fn(&Facts<'_>) -> Option<Box<dyn Change>>,
}

/// The cost of a change beside memory, cheapest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cost {
    /// Nothing: the same results, and no slower.
    Free,
    /// Values round differently.
    Rounding,
    /// A small part of the forward pass runs twice.
    Twice,
    /// More kernels run, each for less.
    MoreKernels,
    /// Batches are smaller.
    SmallerSteps,
    /// The forward pass of modules runs twice.
    Recomputed,
    /// Copies between host and device.
    Transfer,
    /// The state of the optimizer is rounded to 8 bits.
    EightBit,
    /// The program trains something else.
    OtherTraining,
}

impl Cost {
    /// The cost in words.
    pub fn text(self) -> &'static str {
        match self {
            Cost::Free => "free: the same results, no slower",
            Cost::Rounding => "values round differently; matrix products are faster on tensor cores",
            Cost::Twice => "slower: the last layer and the loss run twice",
            Cost::MoreKernels => "slower: more and smaller kernels",
            Cost::SmallerSteps => "slower: kernels work on fewer samples; batch norm sees fewer of them",
            Cost::Recomputed => "slower: the forward pass of these modules runs twice, up to a third more time for all",
            Cost::Transfer => "slower: copies between GPU and CPU",
            Cost::EightBit => "the optimizer's state is rounded to 8 bits",
            Cost::OtherTraining => "trains something else: check the results",
        }
    }
}

/// A change to a program, with what the recording shows about it.
pub trait Change: Debug + Send + Sync {
    /// Its rule.
    fn rule(&self) -> &'static SuggestionRule;

    /// When it is applied, beside other changes.
    fn order(&self) -> Order;

    /// Changes the blocks, as the changes before it have left them.
    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks);

    /// Whether it cannot be combined with a change of this rule. It is enough that one of both says so.
    fn conflicts_with(&self, _other: RuleId) -> bool {
        false
    }

    /// The phases other than forward and backward passes in which it can lower the peak. Not all steps are replayed,
    /// and the peaks of other phases in the other steps stay.
    fn phases(&self) -> &'static [Phase] {
        &[]
    }

    /// Whether the recording leaves open what the change does to some blocks. [`Assumed`] then decides, and no peak is
    /// announced that depends on it.
    fn has_assumptions(&self) -> bool {
        false
    }

    /// Whether it frees what grows until an error. Other changes only delay such an error.
    fn stops_growth(&self) -> bool {
        false
    }

    /// Whether the program then trains something else. Such a change comes last, and is combined with no other.
    fn is_other_training(&self) -> bool {
        false
    }

    /// The action in this program.
    fn action(&self) -> &'static str {
        self.rule().action
    }

    /// The values of the placeholders of the action.
    fn values(&self, _facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        Vec::new()
    }
}

/// When a change is applied. Changes of the same place are applied in the order of their rules.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Order {
    /// Blocks that code outside modules keeps: unused graphs, results, caches, tensors that are loaded.
    Kept,
    /// When gradients are freed.
    Gradients,
    /// The data types of values.
    ValueTypes,
    /// Operations without some of their values.
    Operations,
    /// Tensors that are saved for the backward pass.
    Saved,
    /// The content of buckets.
    Buckets,
    /// Which parameters are trained.
    Trained,
    /// The data types of parameters and of what belongs to them.
    ParameterTypes,
    /// The step of the optimizer.
    OptimizerStep,
    /// The size of batches.
    Batch,
}

/// The value of a placeholder of an action.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Value {
    /// A text.
    Text(String),
    /// The innermost line of a stack outside PyTorch.
    Line(StackId),
    /// The modules of these calls.
    Modules(Vec<ContextId>),
}

/// The assumption about blocks where the recording leaves open how a change affects them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Assumed {
    /// They become as small as they can.
    Smallest,
    /// They stay as large as they can.
    Largest,
}

/// The recorded blocks, as the changes so far have left them.
#[derive(Debug)]
pub struct ChangedBlocks {
    /// The first spans are those of the recorded blocks, in their order. Others are added.
    pub(crate) spans: Vec<Span>,
    /// The gradients of weights that checkpointed code computes.
    pub(crate) recomputed: HashSet<u32>,
    pub(crate) assumed: Assumed,
}

impl ChangedBlocks {
    /// The blocks as recorded.
    pub(crate) fn new(facts: &Facts<'_>, assumed: Assumed) -> ChangedBlocks {
        ChangedBlocks { spans: facts.recorded.spans(), recomputed: HashSet::new(), assumed }
    }

    /// The highest sum of the blocks.
    pub(crate) fn peak(&self, facts: &Facts<'_>) -> u64 {
        span::peak(&self.spans, &facts.recorded.settings).0
    }
}
