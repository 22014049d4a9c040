//! Results that an evaluation keeps on the device: in a list, or in a tensor that grows. On the CPU they need no device
//! memory after the iteration that computed them.

use std::collections::{BTreeMap, HashMap};

use memtrace_trace::ids::{ContextId, StackId};

use super::batch::kept_places;
use super::calls::Call;
use super::evaluation::graph_blocks;
use super::recorded::Recorded;
use super::span::{Span, at};
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;

type Place = (StackId, ContextId);

/// The blocks that hold results.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Results {
    /// The index of a block, and the time at which the next iteration begins there; `None` if a larger block replaces
    /// it.
    blocks: Vec<(u32, Option<u32>)>,
}

impl Results {
    /// Finds the results. A program that only calls a model may need what grows on the device: the past of a
    /// conversation. It is left out unless `is_training`. `outermost`: the outermost calls of modules.
    pub(super) fn find(recorded: &Recorded<'_>, outermost: &[Call], is_training: bool) -> Results {
        let kept = kept_places(recorded);
        let is_result = |block: &BlockLifetime| {
            block.phase.is_forward_only() && matches!(block.category, Category::Activation | Category::Temporary)
        };
        let of_graphs = graph_blocks(recorded, outermost);
        let mut places: HashMap<Place, Vec<u32>> = HashMap::new();
        for (index, block) in recorded.blocks.iter().enumerate().filter(|(_, block)| is_result(block)) {
            let place = (block.stack, block.context);
            if kept.contains(&place) && !of_graphs.contains(&(index as u32)) {
                places.entry(place).or_default().push(index as u32);
            }
        }
        let block = |index: &u32| &recorded.blocks[*index as usize];
        // What is still there when a training step computes is not only a result: targets, features, a teacher's output.
        let in_backward = |block: &&BlockLifetime| block.phase == Phase::Backward;
        let backward: Vec<u32> = recorded.blocks.iter().filter(in_backward).map(|block| block.allocated).collect();
        let is_used_later = |index: &u32| {
            let next = backward.partition_point(|seq| *seq < block(index).allocated);
            backward.get(next).is_some_and(|seq| *seq < block(index).freed.min(recorded.until))
        };
        places.retain(|_, indices| !indices.iter().any(is_used_later));
        let mut blocks = Vec::new();
        for indices in places.values() {
            let grows = |pair: &[u32]| block(&pair[1]).requested() > block(&pair[0]).requested();
            let grown = indices.windows(2).filter(|pair| grows(pair)).count();
            let is_growing = grown * 2 >= indices.len();
            if is_growing && !is_training {
                continue;
            }
            for (at, index) in indices.iter().enumerate() {
                let next = indices.get(at + 1).map(|next| block(next).allocated);
                match next {
                    _ if is_growing => blocks.push((*index, None)),
                    Some(next) if next < block(index).freed => blocks.push((*index, Some(next))),
                    _ => {}
                }
            }
        }
        blocks.sort_unstable();
        Results { blocks }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The stack that allocates most bytes of results.
    pub(super) fn place(&self, recorded: &Recorded<'_>) -> Option<StackId> {
        let mut bytes: BTreeMap<StackId, u64> = BTreeMap::new();
        for (index, _) in &self.blocks {
            let block = &recorded.blocks[*index as usize];
            *bytes.entry(block.stack).or_default() += block.size();
        }
        bytes.into_iter().max_by_key(|(stack, bytes)| (*bytes, std::cmp::Reverse(*stack))).map(|(stack, _)| stack)
    }

    /// Moves the results to the CPU.
    pub(super) fn remove(&self, spans: &mut [Span]) {
        for (index, next) in &self.blocks {
            let span = &mut spans[*index as usize];
            match next {
                Some(next) => span.end_by(at(*next)),
                None => span.vanish(),
            }
        }
    }
}
