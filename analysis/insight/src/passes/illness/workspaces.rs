//! Workspaces of cuBLAS: PyTorch gives each handle one for each stream and never takes it back.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::Birth;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Workspaces {
    /// Blocks as large as a workspace at one moment, at most.
    pub most: u64,
    /// Their bytes then.
    pub bytes: u64,
    /// Streams they were for, and how many were made on each.
    pub streams: BTreeMap<u64, u64>,
    /// Who made any.
    pub stacks: BTreeSet<StackId>,
    /// Who made the latest that was one more than before.
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
