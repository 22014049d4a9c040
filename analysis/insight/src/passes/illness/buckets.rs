//! Buckets of DistributedDataParallel: a second copy of the gradients, unless the gradients are views of the buckets.

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::Birth;

/// The rules for making buckets. The constructor makes them; they are rebuilt once the order of gradients is known.
const BUILT: &str = "load: DistributedDataParallel built";
const REBUILT: &str = "compute: DistributedDataParallel's buckets";

pub(super) fn is_bucket(rule: &str) -> bool {
    rule == BUILT || rule == REBUILT
}

/// The buckets of one device.
#[derive(Clone, Debug, Default)]
pub struct Buckets {
    /// Bytes now.
    pub bytes: u64,
    /// The highest number of bytes at one point in time.
    pub most: u64,
    /// The number of blocks now.
    blocks: u64,
    /// The number of blocks at the latest optimizer step.
    pub blocks_in_use: u64,
    /// Bytes at the latest optimizer step, after the backward pass has left its gradients.
    pub in_use: u64,
    /// The stack and context that wrapped the model.
    pub by: Option<(StackId, ContextId)>,
}

impl Buckets {
    pub(super) fn born(&mut self, birth: &Birth, rule: &str) {
        self.bytes += birth.size;
        self.blocks += 1;
        self.most = self.most.max(self.bytes);
        if rule == BUILT {
            self.by.get_or_insert((birth.stack, birth.context));
        }
    }

    pub(super) fn freed(&mut self, birth: &Birth) {
        self.bytes = self.bytes.saturating_sub(birth.size);
        self.blocks = self.blocks.saturating_sub(1);
    }

    /// Takes an event of an optimizer's step.
    #[inline]
    pub(super) fn at_step(&mut self) {
        (self.in_use, self.blocks_in_use) = (self.bytes, self.blocks);
    }
}
