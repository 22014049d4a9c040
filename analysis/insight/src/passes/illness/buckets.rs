//! Buckets of DistributedDataParallel: a second copy of the gradients, unless gradients are views of them.

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::Birth;

/// The rules that mean making buckets: by the constructor, and anew once the order of gradients is known.
const BUILT: &str = "load: DistributedDataParallel built";
const REBUILT: &str = "compute: DistributedDataParallel's buckets";

pub(super) fn is_bucket(rule: &str) -> bool {
    rule == BUILT || rule == REBUILT
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Buckets {
    /// Bytes now.
    pub bytes: u64,
    /// Bytes at one moment, at most.
    pub most: u64,
    /// Blocks now.
    blocks: u64,
    /// How many they were.
    pub blocks_in_use: u64,
    /// Bytes when the latest backward had left its gradients.
    pub in_use: u64,
    /// Where the program wrapped its model.
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

    /// An optimizer's step begins or goes on.
    #[inline]
    pub(super) fn at_step(&mut self) {
        (self.in_use, self.blocks_in_use) = (self.bytes, self.blocks);
    }
}
