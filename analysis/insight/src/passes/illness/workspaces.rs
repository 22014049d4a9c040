//! Workspaces of cuBLAS. PyTorch allocates one per handle and stream and never frees it.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::Birth;

/// The workspaces of one device.
#[derive(Clone, Debug, Default)]
pub struct Workspaces {
    /// The highest number of workspace-sized blocks at one point in time.
    pub most: u64,
    /// Their bytes at that time.
    pub bytes: u64,
    /// By stream: the number of workspaces allocated on it.
    pub streams: BTreeMap<u64, u64>,
    /// The stacks that allocated any.
    pub stacks: BTreeSet<StackId>,
    /// The stack and context of the allocation that last raised the highest number.
    pub latest: (StackId, ContextId),
    live: u64,
    live_bytes: u64,
}

impl Workspaces {
    pub(super) fn born(&mut self, birth: &Birth, stream: u64) {
        self.live += 1;
        self.live_bytes += birth.size;
        self.stacks.insert(birth.stack);
        *self.streams.entry(stream).or_default() += 1;
        if self.live > self.most {
            (self.most, self.bytes, self.latest) = (self.live, self.live_bytes, (birth.stack, birth.context));
        }
    }

    pub(super) fn freed(&mut self, birth: &Birth) {
        self.live = self.live.saturating_sub(1);
        self.live_bytes = self.live_bytes.saturating_sub(birth.size);
    }
}
