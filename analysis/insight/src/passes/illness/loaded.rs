//! Blocks that were read from checkpoints, and whether they stay beside the model that they were copied into.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::Mark;
use crate::passes::category::Birth;

/// The rules of [`crate::rules::frame_rule`] for reading a checkpoint.
const CHECKPOINTS: [&str; 3] = ["load: torch.load", "load: safetensors", "load: checkpoint"];

pub(super) fn is_checkpoint(rule: &str) -> bool {
    CHECKPOINTS.contains(&rule)
}

/// A block that was read from a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoadedBlock {
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
pub struct Loaded {
    /// The highest number of bytes from checkpoints at one point in time.
    pub most: u64,
    /// The source of the allocation that reached it.
    pub by: Option<(StackId, ContextId)>,
    /// The blocks read that were still allocated when the second step began, or at the end if there was no second step.
    pub kept: Vec<LoadedBlock>,
    /// By requested size: the number of the model's other blocks at that time.
    pub model: HashMap<u64, u64>,
    live: HashMap<u64, LoadedBlock>,
    others: HashMap<u64, u64>,
    bytes: u64,
    taken: bool,
}

impl Loaded {
    #[inline]
    pub(super) fn born(&mut self, birth: &Birth, mark: Mark, step: Option<u32>) {
        if !self.taken && step.is_some_and(|step| step > 0) {
            self.take();
        }
        if mark.is(Mark::LOADED) {
            let Birth { seq, size, requested, stack, context, .. } = *birth;
            self.live.insert(seq, LoadedBlock { seq, size, requested, stack, context });
            self.bytes += size;
            if self.bytes > self.most {
                (self.most, self.by) = (self.bytes, Some((stack, context)));
            }
        } else if mark.is(Mark::MODEL) {
            *self.others.entry(birth.requested).or_default() += 1;
        }
    }

    pub(super) fn freed(&mut self, birth: &Birth, mark: Mark) {
        if mark.is(Mark::LOADED) {
            self.bytes = self.bytes.saturating_sub(birth.size);
            self.live.remove(&birth.seq);
        } else if let Some(count) = self.others.get_mut(&birth.requested) {
            *count = count.saturating_sub(1);
        }
    }

    fn take(&mut self) {
        self.taken = true;
        self.kept = self.live.values().copied().collect();
        self.kept.sort_by_key(|block| block.seq);
        self.model = self.others.clone();
    }

    pub(super) fn finish(&mut self) {
        if !self.taken {
            self.take();
        }
        (self.live, self.others) = (HashMap::new(), HashMap::new());
    }

    /// The blocks that a checkpoint keeps beside the model. Each block of the model accounts for one checkpoint block
    /// of its size. `named`: whether the block with this `seq` is itself a parameter or optimizer state of the program.
    pub fn beside_the_model(&self, named: impl Fn(u64) -> bool) -> Vec<LoadedBlock> {
        let mut model = self.model.clone();
        let unused = self.kept.iter().filter(|block| !named(block.seq));
        let twins = unused.filter(|block| {
            let twin = model.get_mut(&block.requested).filter(|count| **count > 0);
            twin.map(|count| *count -= 1).is_some()
        });
        twins.copied().collect()
    }
}
