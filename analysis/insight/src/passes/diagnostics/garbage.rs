//! Blocks that only CPython's cyclic garbage collector freed: memory that unreachable reference cycles held.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::BlockAllocation;
use crate::passes::phase::ProgramPosition;

/// What the collector freed of one source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CollectedBlocks {
    /// The number of bytes.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The highest number of bytes in one collection.
    pub largest_collection: u64,
    /// The sum over the blocks of bytes times clock ticks from allocation to collection. When a block became garbage in
    /// between is unknown.
    pub byte_ticks: u128,
    /// The highest number of steps from allocation to collection.
    pub steps: u32,
    /// The number of the latest collection that freed any, and the bytes that it freed.
    collection: u64,
    collection_bytes: u64,
}

/// What the collector freed on one device.
#[derive(Clone, Debug, Default)]
pub struct CollectedGarbage {
    by_source: HashMap<(StackId, ContextId), CollectedBlocks>,
    pending: Vec<(BlockAllocation, u64, Option<u32>)>,
    /// The number of collections that freed device memory.
    pub collections: u64,
    /// The highest number of bytes in one collection.
    pub largest_collection: u64,
}

impl CollectedGarbage {
    pub(super) fn freed(&mut self, block: &BlockAllocation, ticks: u64, now: &ProgramPosition) {
        self.pending.push((*block, ticks, now.step));
    }

    /// Takes the next allocation, which counts the collection before it. A collection without an allocation after it
    /// belongs to the program's end.
    #[inline]
    pub(super) fn next_allocation(&mut self) {
        if !self.pending.is_empty() {
            self.count_collection();
        }
    }

    fn count_collection(&mut self) {
        self.collections += 1;
        let mut sum = 0;
        for (block, ticks, step) in self.pending.drain(..) {
            let collected = self.by_source.entry((block.stack, block.context)).or_default();
            if collected.collection != self.collections {
                (collected.collection, collected.collection_bytes) = (self.collections, 0);
            }
            collected.bytes += block.size;
            collected.blocks += 1;
            collected.collection_bytes += block.size;
            collected.largest_collection = collected.largest_collection.max(collected.collection_bytes);
            collected.byte_ticks += u128::from(block.size) * u128::from(ticks.saturating_sub(block.ticks));
            let steps = step.unwrap_or(0).saturating_sub(block.position.step.unwrap_or(0));
            collected.steps = collected.steps.max(steps);
            sum += block.size;
        }
        self.largest_collection = self.largest_collection.max(sum);
    }

    /// What was freed by source, largest collection first.
    pub fn collected(&self) -> Vec<((StackId, ContextId), CollectedBlocks)> {
        let mut all: Vec<_> = self.by_source.iter().map(|(source, c)| (*source, *c)).collect();
        all.sort_by_key(|(source, c)| (std::cmp::Reverse((c.largest_collection, c.bytes)), *source));
        all
    }
}
