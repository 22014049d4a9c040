//! Results that an evaluation keeps on the device: in a list, or in a tensor that grows. On the CPU they need no device
//! memory after the iteration that computed them.

use std::collections::{BTreeMap, HashMap, HashSet};

use memtrace_trace::ids::{ContextId, StackId};

use super::change::{Change, ChangedBlocks, FORWARD_ONLY, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::batch::kept_places;
use super::recorded::calls::{Call, RESULTS};
use super::recorded::span::at;
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::ResultsToCpu,
    action: "move the results of {place} to the CPU after each call: result.cpu()",
    condition: "Without gradients, a place allocates blocks that stay while a later iteration comes to it, and no \
                backward pass begins before they are freed. In a run without a backward pass they do not grow.",
    method: "Such blocks end before the next iteration. Those that each iteration replaces by larger ones vanish.",
    at_most: false,
    programs: &["predictions", "joined"],
    find,
};

/// A stack and its autograd node.
type AllocationSite = (StackId, ContextId);

/// The blocks that hold results.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ResultsToCpu {
    /// The index of a block, and the time at which the next iteration begins there; `None` if a larger block replaces
    /// it.
    blocks: Vec<(u32, Option<u32>)>,
}

impl ResultsToCpu {
    /// Finds the results. A program that only calls a model may need what grows on the device: the past of a
    /// conversation. It is left out unless `is_training`. `outermost`: the outermost calls of modules.
    fn of(recorded: &Recorded<'_>, outermost: &[Call], is_training: bool) -> ResultsToCpu {
        let kept = kept_places(recorded);
        let is_result = |block: &BlockLifetime| block.start.phase.is_forward_only() && may_be_result(block.category);
        let of_graphs = graph_blocks(recorded, outermost);
        let mut places: HashMap<AllocationSite, Vec<u32>> = HashMap::new();
        for (index, block) in recorded.blocks.iter().enumerate().filter(|(_, block)| is_result(block)) {
            let place = (block.start.stack, block.start.context);
            if kept.contains(&place) && !of_graphs.contains(&(index as u32)) {
                places.entry(place).or_default().push(index as u32);
            }
        }
        let block = |index: &u32| &recorded.blocks[*index as usize];
        // What is still there when a training step computes is not only a result: targets, features, a teacher's
        // output.
        let in_backward = |block: &&BlockLifetime| block.start.phase == Phase::Backward;
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
        ResultsToCpu { blocks }
    }

    /// The stack that allocates most bytes of results.
    fn largest_place(&self, recorded: &Recorded<'_>) -> Option<StackId> {
        let mut bytes: BTreeMap<StackId, u64> = BTreeMap::new();
        for (index, _) in &self.blocks {
            let block = &recorded.blocks[*index as usize];
            *bytes.entry(block.start.stack).or_default() += block.size();
        }
        bytes.into_iter().max_by_key(|(stack, bytes)| (*bytes, std::cmp::Reverse(*stack))).map(|(stack, _)| stack)
    }
}

/// Whether blocks of this category can be results. What is joined to one tensor, or kept in a bounded list, is a kept
/// tensor, and one that the recording ends with may be of no known kind.
fn may_be_result(category: Category) -> bool {
    use Category::{Activation, Input, KeptTensor, Temporary, Unknown};
    matches!(category, Activation | Temporary | KeptTensor | Input | Unknown)
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    if facts.ends_in_evaluation() {
        return None;
    }
    let results = ResultsToCpu::of(&facts.recorded, &facts.outermost, facts.is_training());
    if results.blocks.is_empty() { None } else { Some(Box::new(results)) }
}

impl Change for ResultsToCpu {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Kept
    }

    fn apply(&self, _facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        for (index, next) in &self.blocks {
            let span = &mut blocks.spans[*index as usize];
            match next {
                Some(next) => span.end_by(at(*next)),
                None => span.vanish(),
            }
        }
    }

    fn phases(&self) -> &'static [Phase] {
        FORWARD_ONLY
    }

    fn stops_growth(&self) -> bool {
        true
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        vec![("place", Value::Line(self.largest_place(&facts.recorded).unwrap_or_default()))]
    }
}

/// By index: the blocks that outlive an outermost call of a module and are not its results. Only a graph keeps them.
fn graph_blocks(recorded: &Recorded<'_>, outermost: &[Call]) -> HashSet<u32> {
    let inner = |call: &Call| -> Vec<u32> {
        let end = call.end(recorded);
        let outlives = |index: &&u32| recorded.blocks[**index as usize].freed > end;
        call.blocks.iter().rev().filter(outlives).skip(RESULTS).copied().collect()
    };
    outermost.iter().flat_map(inner).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suggestions::test_program::{FIRST, one_step};

    #[test]
    fn results_of_an_evaluation_need_no_device_memory_on_the_cpu() {
        let mut program = one_step();
        for _ in 0..4 {
            let hidden = program.alloc(200, Phase::Eval, Category::Activation, FIRST);
            program.alloc(20, Phase::Eval, Category::Activation, ContextId::NONE);
            program.free(hidden, ContextId::NONE);
        }
        let base = program.peak() - (200 + 4 * 20);
        // The results of one iteration, and the tensors of the next.
        assert_eq!(program.peak_with(find), base + 200 + 20);
    }
}
