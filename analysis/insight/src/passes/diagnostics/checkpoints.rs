//! Blocks that were read from checkpoints, and whether they stay beside the model that they were copied into.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::mark::Mark;
use crate::passes::category::BlockAllocation;
use crate::rules::PhaseRuleId;

/// Whether the rule is about reading a checkpoint.
pub(super) fn is_checkpoint(rule: PhaseRuleId) -> bool {
    use PhaseRuleId::{LoadDistributedCheckpoint, LoadSafetensors, LoadTorchLoad};
    matches!(rule, LoadTorchLoad | LoadSafetensors | LoadDistributedCheckpoint)
}

/// A block that was read from a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CheckpointBlock {
    /// `seq` of the allocation.
    pub seq: u64,
    /// The size in bytes, rounded as the allocator rounds.
    pub size: u64,
    /// The requested size in bytes.
    pub requested: u64,
    /// The stack of the allocation.
    pub stack: StackId,
    /// The context of the allocation.
    pub context: ContextId,
}

/// The checkpoint blocks of one device.
#[derive(Clone, Debug, Default)]
pub struct CheckpointBlocks {
    /// The highest number of bytes from checkpoints at one point in time.
    pub peak: u64,
    /// The source of the allocation that reached it.
    pub peak_at: Option<(StackId, ContextId)>,
    /// The blocks read that were still allocated when the second step began, or at the end if there was no second step.
    pub kept: Vec<CheckpointBlock>,
    /// By requested size: the number of the model's other blocks at that time.
    pub model: HashMap<u64, u64>,
    current: HashMap<u64, CheckpointBlock>,
    others: HashMap<u64, u64>,
    bytes: u64,
    is_sampled: bool,
}

impl CheckpointBlocks {
    #[inline]
    pub(super) fn allocated(&mut self, block: &BlockAllocation, mark: Mark, step: Option<u32>) {
        if !self.is_sampled && step.is_some_and(|step| step > 0) {
            self.sample();
        }
        if mark.is(Mark::LOADED) {
            let BlockAllocation { seq, size, requested, stack, context, .. } = *block;
            self.current.insert(seq, CheckpointBlock { seq, size, requested, stack, context });
            self.bytes += size;
            if self.bytes > self.peak {
                (self.peak, self.peak_at) = (self.bytes, Some((stack, context)));
            }
        } else if mark.is(Mark::MODEL) {
            *self.others.entry(block.requested).or_default() += 1;
        }
    }

    pub(super) fn freed(&mut self, block: &BlockAllocation, mark: Mark) {
        if mark.is(Mark::LOADED) {
            self.bytes = self.bytes.saturating_sub(block.size);
            self.current.remove(&block.seq);
        } else if let Some(count) = self.others.get_mut(&block.requested) {
            *count = count.saturating_sub(1);
        }
    }

    fn sample(&mut self) {
        self.is_sampled = true;
        self.kept = self.current.values().copied().collect();
        self.kept.sort_by_key(|block| block.seq);
        self.model = self.others.clone();
    }

    pub(super) fn finish(&mut self) {
        if !self.is_sampled {
            self.sample();
        }
        (self.current, self.others) = (HashMap::new(), HashMap::new());
    }

    /// The blocks that a checkpoint keeps beside the model. Each block of the model accounts for one checkpoint block
    /// of its size. `is_named`: whether the block with this `seq` is itself a parameter or optimizer state of the
    /// program.
    pub fn beside_the_model(&self, is_named: impl Fn(u64) -> bool) -> Vec<CheckpointBlock> {
        let mut model = self.model.clone();
        let unused = self.kept.iter().filter(|block| !is_named(block.seq));
        let copies = unused.filter(|block| {
            let copied = model.get_mut(&block.requested).filter(|count| **count > 0);
            copied.map(|count| *count -= 1).is_some()
        });
        copies.copied().collect()
    }
}
