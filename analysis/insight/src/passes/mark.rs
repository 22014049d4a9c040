//! The facts that passes keep of an allocated block beside its `BlockAllocation`.

use memtrace_trace::event::{Event, Flags};
use memtrace_trace::ids::StackId;

use super::category::{BlockAllocation, Proof};
use super::phase::{EventClassification, Phase};
use super::stacks::StackFacts;
use crate::rules::{Meaning, PhaseRuleId, is_workspace_size};
use memtrace_replay::BlockId;

/// The facts about an allocated block that are not in its `BlockAllocation`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Mark {
    /// A combination of the constants.
    pub(crate) bits: u8,
    /// The number of the call of a model that allocated the block, counted over all places.
    pub(crate) call: u32,
    /// The stack up to the place where the program calls its model; `NONE` outside a model.
    pub(crate) site: StackId,
}

impl Mark {
    /// Allocated by a forward pass while autograd recorded.
    pub(crate) const GRAPH: u8 = 1;
    /// Autograd ran a node that this same stack made.
    pub(crate) const NODE_RAN: u8 = 2;
    /// Read from a checkpoint.
    pub(crate) const LOADED: u8 = 4;
    /// Allocated by a backward pass.
    pub(crate) const BACKWARD: u8 = 8;
    /// A bucket of DistributedDataParallel.
    pub(crate) const BUCKET: u8 = 16;
    /// A workspace of cuBLAS, or as large as one.
    pub(crate) const WORKSPACE: u8 = 32;
    /// Belongs to a model.
    pub(crate) const MODEL: u8 = 64;
    /// Allocated by an optimizer's step.
    pub(crate) const OPTIMIZER: u8 = 128;

    /// Whether any of the given bits is set.
    pub(crate) const fn is(self, bit: u8) -> bool {
        self.bits & bit != 0
    }
}

/// The marks of the blocks of one device.
#[derive(Clone, Debug)]
pub(crate) struct Marks {
    /// By block id. Valid for allocated blocks.
    marks: Vec<Mark>,
    calls: u32,
    site: StackId,
    /// Whether the recorder knows which blocks are workspaces of cuBLAS. If not, sizes decide.
    knows_workspaces: bool,
}

impl Marks {
    pub(super) fn new(knows_workspaces: bool) -> Marks {
        Marks { marks: Vec::new(), calls: 0, site: StackId::NONE, knows_workspaces }
    }

    /// The mark of an allocated block.
    #[inline]
    pub(super) fn of(&self, id: BlockId) -> Mark {
        self.marks.get(id.index()).copied().unwrap_or_default()
    }

    /// Marks a block that is allocated.
    #[inline]
    pub(super) fn allocated(
        &mut self,
        id: BlockId,
        block: &BlockAllocation,
        e: &Event,
        facts: &StackFacts,
        classification: &EventClassification,
    ) -> Mark {
        let mark = self.mark(block, e, facts, classification);
        match self.marks.get_mut(id.index()) {
            Some(old) => *old = mark,
            None => self.marks.resize(id.index() + 1, mark),
        }
        mark
    }

    #[inline]
    fn mark(
        &mut self,
        block: &BlockAllocation,
        e: &Event,
        facts: &StackFacts,
        classification: &EventClassification,
    ) -> Mark {
        let site = facts.outermost_compute;
        if site != self.site {
            self.site = site;
            self.calls += u32::from(!site.is_none());
        }
        let recorded = e.flags.contains(Flags::GRAD_KNOWN) && e.flags.contains(Flags::GRAD_ENABLED);
        // A workspace belongs to no graph and to no step.
        let by_size = !self.knows_workspaces && may_be_workspace(block);
        let is_workspace = block.proof == Proof::CublasWorkspace || by_size;
        if is_workspace && classification.meaning() != Some(Meaning::Load) {
            return Mark { bits: Mark::WORKSPACE, call: self.calls, site };
        }
        let mut bits = 0;
        match block.phase {
            Phase::Forward | Phase::Eval if recorded && classification.may_record() => {
                bits |= Mark::GRAPH;
                if facts.made_node {
                    bits |= Mark::NODE_RAN;
                }
            }
            Phase::Backward => bits |= Mark::BACKWARD,
            Phase::Optimizer => bits |= Mark::OPTIMIZER,
            Phase::Load if is_checkpoint(classification.rule) => bits |= Mark::LOADED,
            Phase::Load if classification.meaning() == Some(Meaning::Load) => bits |= Mark::MODEL,
            _ => {}
        }
        if is_bucket(classification.rule) {
            bits |= Mark::BUCKET;
        }
        Mark { bits, call: self.calls, site }
    }
}

/// Whether the rule is about reading a checkpoint.
fn is_checkpoint(rule: PhaseRuleId) -> bool {
    use PhaseRuleId::{LoadDistributedCheckpoint, LoadSafetensors, LoadTorchLoad};
    matches!(rule, LoadTorchLoad | LoadSafetensors | LoadDistributedCheckpoint)
}

/// Whether the rule is about allocating buckets. The constructor allocates them. They are rebuilt once the order of
/// gradients is known.
fn is_bucket(rule: PhaseRuleId) -> bool {
    matches!(rule, PhaseRuleId::LoadDdpBuilt | PhaseRuleId::ComputeDdpBuckets)
}

/// Whether a block is as large as a cuBLAS workspace and nothing shows that it is something else. Where the model
/// computes, a workspace has a proof: any code that multiplies matrices, or may do so, gives one.
fn may_be_workspace(block: &BlockAllocation) -> bool {
    let is_something_else = match block.phase {
        Phase::Data => true,
        Phase::Forward | Phase::Backward | Phase::Recompute | Phase::Eval | Phase::Generate | Phase::Rollout => {
            matches!(
                block.proof,
                Proof::None
                    | Proof::ParameterSized
                    | Proof::AccumulatesGradient
                    | Proof::WeightCast
                    | Proof::Named(_)
                    | Proof::NamedCache
            )
        }
        Phase::Load | Phase::Optimizer | Phase::Other => false,
    };
    is_workspace_size(block.memory.requested) && !is_something_else
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_as_large_as_a_workspace_is_a_result() {
        let cases = [
            (Phase::Eval, Proof::None, 32 << 20, false),
            (Phase::Forward, Proof::None, 32 << 20, false),
            (Phase::Backward, Proof::AccumulatesGradient, 32 << 20, false),
            (Phase::Data, Proof::None, 32 << 20, false),
            // Code that multiplies matrices, or that may do so.
            (Phase::Forward, Proof::WorkspaceSized, 32 << 20, true),
            (Phase::Eval, Proof::MaybeWorkspace, 32 << 20, true),
            (Phase::Other, Proof::None, 32 << 20, true),
            (Phase::Forward, Proof::WorkspaceSized, 31 << 20, false),
        ];
        for (phase, proof, requested, expected) in cases {
            let mut block = BlockAllocation::for_tests(1);
            (block.phase, block.proof, block.memory.requested) = (phase, proof, requested);
            assert_eq!(may_be_workspace(&block), expected, "{phase:?} {proof:?} {requested}");
        }
    }
}
