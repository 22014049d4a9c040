//! Buckets of DistributedDataParallel: a second copy of the gradients, unless the gradients are views of the buckets.

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::BlockAllocation;
use crate::rules::PhaseRuleId;

/// Whether the rule is about allocating buckets. The constructor allocates them. They are rebuilt once the order of
/// gradients is known.
pub(super) fn is_bucket(rule: PhaseRuleId) -> bool {
    matches!(rule, PhaseRuleId::LoadDdpBuilt | PhaseRuleId::ComputeDdpBuckets)
}

/// The buckets of one device.
#[derive(Clone, Debug, Default)]
pub struct DdpBuckets {
    /// Bytes now.
    pub bytes: u64,
    /// The highest number of bytes at one point in time.
    pub peak: u64,
    /// The number of blocks now.
    blocks: u64,
    /// The number of blocks at the latest optimizer step.
    pub blocks_at_step: u64,
    /// Bytes at the latest optimizer step, after the backward pass has left its gradients.
    pub bytes_at_step: u64,
    /// The stack and context that wrapped the model.
    pub allocated_at: Option<(StackId, ContextId)>,
}

impl DdpBuckets {
    pub(super) fn allocated(&mut self, block: &BlockAllocation, rule: PhaseRuleId) {
        self.bytes += block.size;
        self.blocks += 1;
        self.peak = self.peak.max(self.bytes);
        if rule == PhaseRuleId::LoadDdpBuilt {
            self.allocated_at.get_or_insert((block.stack, block.context));
        }
    }

    pub(super) fn freed(&mut self, block: &BlockAllocation) {
        self.bytes = self.bytes.saturating_sub(block.size);
        self.blocks = self.blocks.saturating_sub(1);
    }

    /// Takes an event of an optimizer's step.
    #[inline]
    pub(super) fn at_step(&mut self) {
        (self.bytes_at_step, self.blocks_at_step) = (self.bytes, self.blocks);
    }
}
