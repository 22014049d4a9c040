//! Results that an evaluation keeps on the device: in a list, or in a tensor that grows. On the CPU they need no device
//! memory after the iteration that computed them.

use std::collections::{BTreeMap, HashMap, HashSet};

use memtrace_trace::ids::{ContextId, StackId};

use super::change::{Change, ChangedBlocks, Cost, FORWARD_ONLY, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::batch::{joined, kept_places};
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
                backward pass begins before they are freed, or they stay until the next evaluation. In a run without a \
                backward pass they do not grow.",
    method: "Such blocks end before the next iteration. Those that each iteration replaces by larger ones vanish, and \
             so does what joins them.",
    cost: Cost::Transfer,
    code: &["results.append(output.detach().cpu())  # {place}"],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.cpu.html",
    at_most: false,
    programs: &["predictions", "joined"],
    find,
};

/// An evaluation that collects has at least this many results at once.
const COLLECTED: usize = 3;

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
    /// conversation. It is left out unless `is_training`. `outermost` are the outermost calls of modules.
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
        // Blocks that still exist when a training step computes are not only results: targets, features, a teacher's
        // output.
        let in_backward = |block: &&BlockLifetime| block.start.phase == Phase::Backward;
        let backward: Vec<u32> = recorded.blocks.iter().filter(in_backward).map(|block| block.allocated).collect();
        let is_used_later = |index: &u32| {
            let next = backward.partition_point(|seq| *seq < block(index).allocated);
            backward.get(next).is_some_and(|seq| *seq < block(index).freed.min(recorded.until))
        };
        // An evaluation can keep its results in a variable until the next one replaces them.
        let passes_before = |seq: u32| backward.partition_point(|pass| *pass < seq);
        let round = |index: &u32| passes_before(block(index).allocated);
        let is_replaced = |indices: &[u32]| {
            let rounds: Vec<&[u32]> = indices.chunk_by(|a, b| round(a) == round(b)).collect();
            let next = |at: usize| rounds.get(at + 1).map_or(backward.len(), |next| round(&next[0]));
            let until_next = |at: usize, index: &u32| passes_before(block(index).freed) >= next(at);
            rounds.len() > 1
                && rounds.iter().all(|round| round.len() >= COLLECTED)
                && rounds.iter().enumerate().all(|(at, round)| {
                    let mut held = round.iter().filter(|index| is_used_later(index));
                    held.all(|index| block(index).start.phase == Phase::Eval && until_next(at, index))
                })
        };
        places.retain(|(stack, _), indices| {
            !indices.iter().any(is_used_later) || is_replaced(indices) && !recorded.is_in_each_step(*stack)
        });
        let (mut blocks, mut lists) = (Vec::new(), HashSet::new());
        for (place, indices) in &places {
            let grows = |pair: &[u32]| block(&pair[1]).requested() > block(&pair[0]).requested();
            let grown = indices.windows(2).filter(|pair| grows(pair)).count();
            let is_growing = grown * 2 >= indices.len();
            match is_growing {
                true if !is_training => continue,
                true => {}
                false => _ = lists.insert(*place),
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
        // Joined results, and tensors computed from them, are then on the CPU as well.
        blocks.extend(joined(recorded, &lists).into_iter().map(|index| (index, None)));
        blocks.sort_unstable();
        blocks.dedup_by_key(|(index, _)| *index);
        ResultsToCpu { blocks }
    }

    /// The stack that allocates most bytes of results.
    fn largest_place(&self, recorded: &Recorded<'_>) -> Option<StackId> {
        let mut bytes: BTreeMap<StackId, u64> = BTreeMap::new();
        // Tensors that replace or join results are computed from them.
        let has_results = self.blocks.iter().any(|(_, next)| next.is_some());
        for (index, _) in self.blocks.iter().filter(|(_, next)| next.is_some() || !has_results) {
            let block = &recorded.blocks[*index as usize];
            *bytes.entry(block.start.stack).or_default() += block.size();
        }
        bytes.into_iter().max_by_key(|(stack, bytes)| (*bytes, std::cmp::Reverse(*stack))).map(|(stack, _)| stack)
    }
}

/// Whether blocks of this category can be results. Blocks that are joined to one tensor, or kept in a bounded list, are
/// kept tensors, and a block that the recording ends with may be of no known kind.
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
    use crate::suggestions::test_program::{FIRST, NODE_OF_FIRST, Program, one_step};

    #[test]
    fn results_that_the_next_evaluation_replaces_need_no_device_memory_on_the_cpu() {
        let mut program = Program::default();
        let mut held: Vec<usize> = Vec::new();
        for step in 0..3 {
            program.step = step;
            let saved = program.activation(30, FIRST);
            program.passes += 1;
            let gradient = program.alloc(1, Phase::Backward, Category::AutogradDetail, NODE_OF_FIRST);
            program.free(saved, NODE_OF_FIRST);
            program.free(gradient, NODE_OF_FIRST);
            held.drain(..).for_each(|old| program.free(old, ContextId::NONE));
            for _ in 0..4 {
                held.push(program.alloc(20, Phase::Eval, Category::KeptTensor, FIRST));
                let target = program.alloc(1, Phase::Eval, Category::Input, ContextId::NONE);
                program.free(target, ContextId::NONE);
            }
            held.push(program.alloc(80, Phase::Eval, Category::KeptTensor, ContextId::NONE));
        }
        assert_eq!(program.peak(), 160 + 30 + 1);
        assert_eq!(program.peak_with(find), 20 + 30 + 1, "one result stays in a variable");
    }

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
