//! What was read from checkpoints, and whether it stays beside the model that it was copied into.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::Mark;
use crate::passes::category::Birth;

/// The rules of [`crate::rules::frame_rule`] that mean reading a checkpoint.
const CHECKPOINTS: [&str; 3] = ["load: torch.load", "load: safetensors", "load: checkpoint"];

pub(super) fn is_checkpoint(rule: &str) -> bool {
    CHECKPOINTS.contains(&rule)
}

/// A block that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoadedBlock {
    /// `seq` of its allocation.
    pub seq: u64,
    /// Its (rounded) size.
    pub size: u64,
    /// What was asked for.
    pub requested: u64,
    /// The stack.
    pub stack: StackId,
    /// What was going on.
    pub context: ContextId,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// Bytes read that were alive at one moment, at most.
    pub most: u64,
    /// The source of most of it.
    pub by: Option<(StackId, ContextId)>,
    /// What was read and still there when the second step began (or, with fewer steps, at the end).
    pub kept: Vec<LoadedBlock>,
    /// The requested sizes of the model's other blocks then, and how many of each.
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

    /// Those blocks that a checkpoint keeps beside the model: each block of the model accounts for one of its size. `named`: the
    /// program uses this block itself, as a parameter or as an optimizer's state.
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
