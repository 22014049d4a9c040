//! Deferred frees: blocks that the program freed while other streams still used them (`record_stream`). Until the
//! streams are done, no allocation can reuse their memory.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::BlockAllocation;
use memtrace_replay::{Block, BlockId};

/// The deferred frees of one source on one stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeferredSource {
    /// The number of blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The sum over the blocks of bytes times clock ticks between request and completion.
    pub byte_ticks: u128,
}

#[derive(Clone, Copy, Debug)]
struct PendingFree {
    id: BlockId,
    stack: StackId,
    context: ContextId,
    size: u64,
    ticks: u64,
}

/// The deferred frees of one device.
#[derive(Clone, Debug, Default)]
pub struct DeferredFrees {
    now: u64,
    latest: Option<PendingFree>,
    pending: HashMap<BlockId, PendingFree>,
    by_source: HashMap<(StackId, ContextId, u64), DeferredSource>,
    /// The highest number of bytes that waited at one point in time.
    pub peak: u64,
    /// The number of blocks whose completion was not recorded.
    pub never_completed: u64,
}

impl DeferredFrees {
    #[inline]
    pub(super) fn requested(&mut self, id: BlockId, block: &BlockAllocation, ticks: u64) {
        let BlockAllocation { stack, context, size, .. } = *block;
        self.defer();
        self.latest = Some(PendingFree { id, stack, context, size, ticks });
    }

    /// Marks the latest request as deferred. Its completion did not follow at once.
    #[inline]
    fn defer(&mut self) {
        if let Some(earlier) = self.latest.take() {
            self.pending.insert(earlier.id, earlier);
        }
    }

    #[inline]
    pub(super) fn completed(&mut self, id: BlockId, block: &Block, ticks: u64) {
        // Nearly all frees complete at once.
        self.now = ticks;
        if self.latest.is_some_and(|latest| latest.id == id) {
            self.latest = None;
            return;
        }
        if let Some(pending) = self.pending.remove(&id) {
            self.add(&pending, block.stream, ticks);
        }
    }

    fn add(&mut self, pending: &PendingFree, stream: u64, until: u64) {
        let source = self.by_source.entry((pending.stack, pending.context, stream)).or_default();
        source.blocks += 1;
        source.bytes += pending.size;
        source.byte_ticks += u128::from(pending.size) * u128::from(until.saturating_sub(pending.ticks));
    }

    /// Takes the next allocation. `bytes`: bytes that wait, that is, are active but not allocated.
    #[inline]
    pub(super) fn next_allocation(&mut self, bytes: u64) {
        self.defer();
        self.peak = self.peak.max(bytes);
    }

    /// Ends the recording. Blocks that still wait count as pending until `now`.
    pub(super) fn finish(&mut self, stream_of: impl Fn(BlockId) -> u64, now: u64) {
        self.defer();
        for pending in std::mem::take(&mut self.pending).into_values() {
            self.never_completed += 1;
            self.add(&pending, stream_of(pending.id), now.max(self.now));
        }
    }

    /// By source and stream, by bytes times time in descending order.
    pub fn by_source(&self) -> Vec<((StackId, ContextId, u64), DeferredSource)> {
        let mut all: Vec<_> = self.by_source.iter().map(|(source, by)| (*source, *by)).collect();
        all.sort_by_key(|(source, by)| (std::cmp::Reverse(by.byte_ticks), *source));
        all
    }
}
