//! Blocks that only CPython's cyclic garbage collector freed: memory that unreachable reference cycles held.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::Birth;
use crate::passes::phase::Moment;

/// What the collector freed of one source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Collected {
    /// The number of bytes.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The highest number of bytes in one collection.
    pub at_once: u64,
    /// The sum over the blocks of bytes times clock ticks from allocation to collection. When a block became garbage in
    /// between is unknown.
    pub byte_ticks: u128,
    /// The highest number of steps from allocation to collection.
    pub steps: u32,
    run: u64,
    latest: u64,
}

/// What the collector freed on one device.
#[derive(Clone, Debug, Default)]
pub struct Garbage {
    by_source: HashMap<(StackId, ContextId), Collected>,
    pending: Vec<(Birth, u64, Option<u32>)>,
    /// The number of collections that freed device memory.
    pub collections: u64,
    /// The highest number of bytes in one collection.
    pub at_once: u64,
}

impl Garbage {
    pub(super) fn freed(&mut self, birth: &Birth, ticks: u64, now: &Moment) {
        self.pending.push((*birth, ticks, now.step));
    }

    /// Takes the next allocation, which counts the collection before it. A collection without an allocation after it
    /// belongs to the program's end.
    #[inline]
    pub(super) fn settle(&mut self) {
        if !self.pending.is_empty() {
            self.take();
        }
    }

    fn take(&mut self) {
        self.collections += 1;
        let mut sum = 0;
        for (birth, ticks, step) in self.pending.drain(..) {
            let collected = self.by_source.entry((birth.stack, birth.context)).or_default();
            if collected.run != self.collections {
                (collected.run, collected.latest) = (self.collections, 0);
            }
            collected.bytes += birth.size;
            collected.blocks += 1;
            collected.latest += birth.size;
            collected.at_once = collected.at_once.max(collected.latest);
            collected.byte_ticks += u128::from(birth.size) * u128::from(ticks.saturating_sub(birth.ticks));
            let steps = step.unwrap_or(0).saturating_sub(birth.at.step.unwrap_or(0));
            collected.steps = collected.steps.max(steps);
            sum += birth.size;
        }
        self.at_once = self.at_once.max(sum);
    }

    /// What was freed by source, largest collection first.
    pub fn collected(&self) -> Vec<((StackId, ContextId), Collected)> {
        let mut all: Vec<_> = self.by_source.iter().map(|(source, c)| (*source, *c)).collect();
        all.sort_by_key(|(source, c)| (std::cmp::Reverse((c.at_once, c.bytes)), *source));
        all
    }
}
