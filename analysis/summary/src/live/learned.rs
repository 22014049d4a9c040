//! Facts about the blocks of later events, from an analysis of all events so far.

use std::collections::HashMap;

use memtrace_insight::passes::{BlockAllocation, BlockClassification, BlockObserver, Category};
use memtrace_replay::Names;
use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::Event;
use memtrace_trace::ids::{ContextId, FrameId, StackId};

/// The categories of blocks and of the places that allocate them.
#[derive(Clone, Debug, Default)]
pub(super) struct Learned {
    /// By `seq`: the category of a block that was still allocated.
    by_block: HashMap<u64, Category>,
    /// By stack and autograd node: the category of the latest block whose lifetime ended.
    by_place: HashMap<(StackId, ContextId), Category>,
}

impl Learned {
    /// The category of an allocated block: as the analysis has it, or for a block that is newer than it by its name, or
    /// else as earlier blocks of the same place.
    pub(super) fn category(&self, seq: u64, place: (StackId, ContextId), names: &Names) -> Category {
        let known = self.by_block.get(&seq).copied();
        let named = || names.of_allocation(seq).and_then(|names| category_of(names.kind));
        known.or_else(named).or_else(|| self.by_place.get(&place).copied()).unwrap_or(Category::Unknown)
    }
}

fn category_of(kind: TensorKind) -> Option<Category> {
    match kind {
        TensorKind::Parameter | TensorKind::Buffer => Some(Category::Parameter),
        TensorKind::Gradient => Some(Category::Gradient),
        TensorKind::OptimizerState => Some(Category::OptimizerState),
        TensorKind::Other => None,
    }
}

impl BlockObserver for Learned {
    fn lifetime_ended(
        &mut self,
        _: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        _: FrameId,
        free: Option<&Event>,
    ) {
        self.by_place.insert((block.site.stack, block.site.context), classification.category);
        if free.is_none() {
            self.by_block.insert(block.seq, classification.category);
        }
    }
}
