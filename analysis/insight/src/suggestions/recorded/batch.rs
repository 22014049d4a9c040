//! How a program uses batches, and which blocks depend on their size.
//!
//! Blocks that depend on the batch halve with it: activations, inputs of a step, autograd temporaries, and temporaries
//! of forward and backward passes. Weights, gradients, optimizer state, workspaces and copies of weights do not, nor do
//! the gradients of weights that a backward pass adds to existing ones. If one step of many needs far more of a block,
//! the batch is not the reason.

use std::collections::{HashMap, HashSet};

use memtrace_trace::ids::{ContextId, StackId};

use super::Recorded;
use super::span::{Key, Span, at};
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime};
use crate::passes::phase::Phase;

/// A step's blocks that belong to a later one of its backward passes are at most 10 % (1/10) of the gradients, if the
/// program accumulates gradients.
const SMALL_PART: u64 = 10;

/// A block lasts if its place allocates another one this many steps later. One variable keeps its value until the next
/// step replaces it.
const LASTING_STEPS: u32 = 2;
/// The number of steps in a row that replace a block by a larger one.
const GROWN: u32 = 3;

/// How a program uses batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Batches {
    /// No step has a backward pass.
    Inference,
    /// Each step has one backward pass.
    One,
    /// Each step accumulates the gradients of this many backward passes.
    Accumulated(u16),
    /// A step has several backward passes with gradients of their own.
    Several,
}

/// Whether half the batch halves the block.
pub(crate) fn depends_on_batch(recorded: &Recorded<'_>, block: &BlockLifetime, is_training: bool) -> bool {
    let in_model = match block.start.phase {
        Phase::Forward | Phase::Backward | Phase::Recompute => true,
        Phase::Eval | Phase::Generate | Phase::Rollout => !is_training || recorded.is_in_each_step(block.start.stack),
        Phase::Data | Phase::Other => block.start.step != BEFORE_STEPS,
        // The first batch, if the program makes it before the first step. Data that stays is no batch.
        Phase::Load => block.category == Category::Input && recorded.is_freed(block),
        Phase::Optimizer => false,
    };
    let is_excepted =
        is_training && recorded.is_evaluated_step(block.start.step) || recorded.is_outlier(block.start.stack);
    in_model
        && !is_excepted
        && match block.category {
            Category::Activation | Category::Input | Category::KvCache => true,
            Category::AutogradDetail | Category::Temporary => !recorded.is_passing_weight_gradient(block),
            // A part of the graph of a derivative.
            Category::Gradient => recorded.is_freed_by_node(block) && !recorded.is_passing_weight_gradient(block),
            Category::Workspace => recorded.is_no_workspace(block),
            _ => false,
        }
}

/// How the steps of the recording use batches. The last step counts only if there is no other, because it can be cut
/// off.
pub(crate) fn batches(recorded: &Recorded<'_>) -> Batches {
    let mut passes: Vec<(u32, Vec<(u16, u64)>)> = Vec::new();
    for block in
        recorded.blocks.iter().filter(|block| block.start.phase == Phase::Backward && block.start.step != BEFORE_STEPS)
    {
        if passes.last().is_none_or(|(step, _)| *step != block.start.step) {
            passes.push((block.start.step, Vec::new()));
        }
        let Some((_, passes)) = passes.last_mut() else { continue };
        if passes.last().is_none_or(|(pass, _)| *pass != block.start.backward_passes) {
            passes.push((block.start.backward_passes, 0));
        }
        if let (Category::Gradient, Some((_, bytes))) = (block.category, passes.last_mut()) {
            *bytes += block.size();
        }
    }
    if passes.len() > 1 {
        passes.pop();
    }
    let Some((_, most)) = passes.iter().max_by_key(|(_, passes)| passes.len()) else { return Batches::Inference };
    let (first, all) = (most.first().map_or(0, |(_, bytes)| *bytes), most.iter().map(|(_, bytes)| bytes).sum::<u64>());
    match most.len() {
        1 => Batches::One,
        several if (all - first) <= all / SMALL_PART => Batches::Accumulated(several as u16),
        _ => Batches::Several,
    }
}

/// The places whose blocks stay for more than a step, or are replaced by larger ones in each step. Blocks of its
/// batches that a training keeps are as large with smaller batches.
pub(crate) fn lasting_places(recorded: &Recorded<'_>) -> HashSet<(StackId, ContextId)> {
    // By place: its oldest block that is allocated, and how often in a row it was replaced by a larger one.
    let mut places: HashMap<(StackId, ContextId), (&BlockLifetime, u32)> = HashMap::new();
    let mut lasting = HashSet::new();
    let in_step = |block: &&BlockLifetime| {
        block.start.step != BEFORE_STEPS && matches!(block.start.phase, Phase::Data | Phase::Forward | Phase::Other)
    };
    for block in recorded.blocks.iter().filter(in_step) {
        let place = (block.start.stack, block.start.context);
        let (oldest, grown) = places.entry(place).or_insert((block, 0));
        if oldest.freed <= block.allocated {
            (*oldest, *grown) = (block, 0);
        } else if block.start.step > oldest.start.step && block.requested() > oldest.requested() {
            (*oldest, *grown) = (block, *grown + 1);
        }
        if *grown >= GROWN || block.start.step.saturating_sub(oldest.start.step) >= LASTING_STEPS {
            lasting.insert(place);
        }
    }
    lasting
}

/// The blocks that join results kept at places of `kept`, and what code outside modules computes from them: as large
/// with smaller batches.
pub(crate) fn joined(recorded: &Recorded<'_>, kept: &HashSet<(StackId, ContextId)>) -> HashSet<u32> {
    let place = |block: &BlockLifetime| (block.start.stack, block.start.context);
    // By place: the blocks in use and their requested bytes.
    let mut in_use: HashMap<(StackId, ContextId), (u32, u64)> = HashMap::new();
    let (mut joined, mut follows) = (HashSet::new(), false);
    for event in &recorded.events {
        let block = &recorded.blocks[event.block as usize];
        if kept.contains(&place(block)) {
            let (blocks, bytes) = in_use.entry(place(block)).or_default();
            if event.allocates {
                (*blocks, *bytes) = (*blocks + 1, *bytes + block.requested());
            } else {
                (*blocks, *bytes) = (blocks.saturating_sub(1), bytes.saturating_sub(block.requested()));
            }
        }
        if !event.allocates || !block.start.phase.is_forward_only() {
            continue;
        }
        let is_join = || in_use.values().any(|(blocks, bytes)| *blocks > 1 && *bytes == block.requested());
        follows = block.start.context.is_none() && !kept.contains(&place(block)) && (follows || is_join());
        if follows {
            joined.insert(event.block);
        }
    }
    joined
}

/// Halves what depends on the batch.
pub(crate) fn halve(recorded: &Recorded<'_>, is_training: bool, spans: &mut [Span]) {
    let kept = if is_training { lasting_places(recorded) } else { kept_places(recorded) };
    let joined = if is_training { HashSet::new() } else { joined(recorded, &kept) };
    for span in spans {
        let block = &recorded.blocks[span.block as usize];
        let is_kept =
            || kept.contains(&(block.start.stack, block.start.context)) && block.category != Category::KvCache;
        if depends_on_batch(recorded, block, is_training) && !is_kept() && !joined.contains(&span.block) {
            // Between half and all: their geometric mean, whose largest relative error is the smallest.
            span.requested = match recorded.is_reduction_buffer(block) {
                true => (span.requested as f64 * std::f64::consts::FRAC_1_SQRT_2) as u64,
                false => span.requested.div_ceil(2),
            };
        }
    }
}

/// When a gradient that is only added to another one is freed: before the next allocation of another node.
pub(crate) fn passing_end(recorded: &Recorded<'_>, gradient: &BlockLifetime) -> Key {
    let later = &recorded.events[recorded.first_event_after(gradient.allocated)..];
    let next = later.iter().find(|event| event.allocates && event.context != gradient.start.context);
    next.map_or(Key::MAX, |event| at(event.seq) - 1)
}

/// The places whose blocks are kept while a later iteration allocates another one there: results in a list, or in a
/// tensor that grows. With smaller batches there are more of them, and as many bytes.
///
/// An iteration begins with an allocation outside modules, or where the first allocation of a module is repeated.
pub(crate) fn kept_places(recorded: &Recorded<'_>) -> HashSet<(StackId, ContextId)> {
    let mut places: HashMap<(StackId, ContextId), Vec<(&BlockLifetime, u32)>> = HashMap::new();
    let (mut iteration, mut first, mut is_outside) = (0, None, false);
    for block in recorded.blocks.iter().filter(|block| block.start.phase.is_forward_only()) {
        let place = (block.start.stack, block.start.context);
        if block.start.context.is_none() {
            iteration += u32::from(!is_outside);
            first = None;
        } else {
            iteration += u32::from(*first.get_or_insert(place) == place);
        }
        is_outside = block.start.context.is_none();
        places.entry(place).or_default().push((block, iteration));
    }
    // A variable keeps one value until the next iteration has computed another one, again and again. A list keeps more,
    // or is freed as a whole.
    let allocations_before = |seq: u32| recorded.blocks.partition_point(|block| block.allocated < seq);
    places.retain(|(_, context), blocks| {
        let next = |of: usize| blocks.get(blocks.partition_point(|(_, iteration)| *iteration <= blocks[of].1));
        let index = |block: &BlockLifetime| blocks.partition_point(|(other, _)| other.allocated < block.allocated);
        (0..blocks.len()).any(|at| {
            let (block, Some((second, _))) = (blocks[at].0, next(at)) else { return false };
            let outlives = |other: &BlockLifetime| block.freed > other.allocated;
            let is_first = || at.checked_sub(1).is_none_or(|before| blocks[before].0.freed <= block.allocated);
            let is_freed_with = || is_first() && allocations_before(block.freed) == allocations_before(second.freed);
            // Blocks that grow within modules are a past, and no results.
            let grows = || context.is_none() && second.requested() > block.requested();
            outlives(second)
                && (next(index(second)).is_some_and(|(third, _)| outlives(third)) || grows() || is_freed_with())
        })
    });
    places.into_keys().collect()
}

#[cfg(test)]
mod tests {
    use memtrace_replay::AllocatorSettings;

    use super::*;
    use crate::passes::lifetimes::BlockLifetimes;
    use crate::passes::stacks::StackTable;
    use crate::suggestions::test_program::{ACCUMULATE, NET, NODE_OF_FIRST, Program, definitions, one_step};

    #[test]
    fn gradients_of_weights_that_are_added_up_do_not_depend_on_the_batch() {
        let mut program = one_step();
        program.passes = 2;
        let weight = program.alloc(20, Phase::Backward, Category::AutogradDetail, NODE_OF_FIRST);
        program.free(weight, ACCUMULATE);
        let gradient = program.alloc(20, Phase::Backward, Category::AutogradDetail, NODE_OF_FIRST);
        program.free(gradient, NODE_OF_FIRST);
        let definitions = definitions();
        let table = StackTable::new(&definitions);
        let lifetimes = BlockLifetimes { blocks: program.blocks.clone(), ..BlockLifetimes::default() };
        let recorded = Recorded::new(&lifetimes, &definitions, &table, AllocatorSettings::default(), None, None);
        let depends = |index: usize| depends_on_batch(&recorded, &program.blocks[index], true);
        assert!(!depends(weight) && depends(gradient));
        assert_eq!(batches(&recorded), Batches::Accumulated(2));
    }

    /// Whether the results of a model in an evaluation are kept. `freed` is the iteration after which each is freed;
    /// the results grow by `growth` MiB.
    fn are_kept(freed: &[usize], growth: u64) -> bool {
        let mut program = Program::default();
        let mut results = Vec::new();
        for iteration in 0..freed.len() {
            let input = program.alloc(1, Phase::Eval, Category::Input, ContextId::NONE);
            results.push(program.alloc(10 + iteration as u64 * growth, Phase::Eval, Category::Activation, NET));
            program.free(input, ContextId::NONE);
            for (result, until) in results.iter().zip(freed) {
                if *until == iteration {
                    program.free(*result, ContextId::NONE);
                }
            }
        }
        let definitions = definitions();
        let table = StackTable::new(&definitions);
        let lifetimes = BlockLifetimes { blocks: program.blocks, ..BlockLifetimes::default() };
        let recorded = Recorded::new(&lifetimes, &definitions, &table, AllocatorSettings::default(), None, None);
        kept_places(&recorded).iter().any(|(_, context)| *context == NET)
    }

    #[test]
    fn a_list_keeps_results_and_a_variable_keeps_one() {
        assert!(are_kept(&[3, 3, 3, 3], 0), "a list");
        assert!(are_kept(&[1, 1, 3, 3], 0), "lists of two results, each freed as a whole");
        assert!(!are_kept(&[1, 2, 3, 3], 0), "a variable");
        assert!(!are_kept(&[1, 2, 3, 3], 1), "a past, joined with what is new");
        assert!(!are_kept(&[0, 1, 2, 3], 0), "nothing");
    }
}
