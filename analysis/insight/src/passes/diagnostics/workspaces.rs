//! Workspaces of cuBLAS. PyTorch allocates one per handle and stream and never frees it.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::BlockAllocation;

/// The workspaces of one device.
#[derive(Clone, Debug, Default)]
pub struct CublasWorkspaces {
    /// The highest number of workspace-sized blocks at one point in time.
    pub peak: u64,
    /// Their bytes at that time.
    pub bytes: u64,
    /// By stream: the number of workspaces allocated on it.
    pub streams: BTreeMap<u64, u64>,
    /// The stacks that allocated any.
    pub stacks: BTreeSet<StackId>,
    /// The stack and context of the allocation that last raised the highest number.
    pub latest: (StackId, ContextId),
    current: u64,
    current_bytes: u64,
}

impl CublasWorkspaces {
    pub(super) fn allocated(&mut self, block: &BlockAllocation, stream: u64) {
        self.current += 1;
        self.current_bytes += block.size;
        self.stacks.insert(block.stack);
        *self.streams.entry(stream).or_default() += 1;
        if self.current > self.peak {
            (self.peak, self.bytes, self.latest) = (self.current, self.current_bytes, (block.stack, block.context));
        }
    }

    pub(super) fn freed(&mut self, block: &BlockAllocation) {
        self.current = self.current.saturating_sub(1);
        self.current_bytes = self.current_bytes.saturating_sub(block.size);
    }
}
