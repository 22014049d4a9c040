//! The rest of a step that an error interrupted, as blocks.
//!
//! Where an earlier iteration shows it, these are the blocks of that iteration at later times. In the optimizer's first
//! step, they are the state that the optimizer had not allocated for the gradients, and the next forward and backward
//! pass, which are those of the interrupted step again.

use std::collections::{BTreeMap, HashMap};

use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime, LifetimeStart, NEVER};
use crate::passes::phase::Phase;
use crate::passes::rest_of_step::{RestBlock, RestEvent, RestOfStep};
use memtrace_trace::ids::{ContextId, StackId};

/// A request that failed. The recording ends there for replays, or goes on with the rest of the step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FailedRequest {
    /// `seq` of the error.
    pub seq: u64,
    /// The requested bytes.
    pub requested: u64,
    /// The stack and the context of the request.
    pub at: (StackId, ContextId),
    /// The phase.
    pub phase: Phase,
    /// The step; `None` before the first.
    pub step: Option<u32>,
    /// Whether an evaluation that records a graph for nothing made the request.
    pub in_unused_graph: bool,
}

/// The blocks up to the failed request, and those of the rest. `blocks` are the recorded ones before the request, in
/// the order of their allocation. `None` if they lack a block of the earlier iteration.
pub(crate) fn continued(
    blocks: &[BlockLifetime],
    failed: &FailedRequest,
    rest: &RestOfStep,
) -> Option<Vec<BlockLifetime>> {
    let find = |seq: u64| {
        let seq = u32::try_from(seq).ok()?;
        blocks.binary_search_by_key(&seq, |block| block.allocated).ok()
    };
    let start = u32::try_from(failed.seq).ok()?;
    let mut all = blocks.to_vec();
    for block in all.iter_mut().filter(|block| block.freed >= start && block.freed < NEVER) {
        // Blocks freed as the error unwinds would have stayed.
        (block.freed, block.freed_context) = (NEVER, ContextId::NONE);
    }
    let Some(RestEvent::Requested { earlier: first, .. }) = rest.events.first() else { return None };
    let passes_then = blocks[find(*first)?].start.backward_passes;
    let passes_now = blocks.last().map_or(0, |block| block.start.backward_passes);
    // By number of the request: the indices of its block and of the earlier one.
    let mut new: HashMap<usize, (usize, usize)> = HashMap::new();
    for (seq, event) in (start..NEVER).zip(&rest.events) {
        match event {
            RestEvent::Requested { earlier, .. } => {
                let earlier = find(*earlier)?;
                new.insert(new.len(), (all.len(), earlier));
                let mut block = blocks[earlier];
                (block.allocated, block.freed, block.freed_context) = (seq, NEVER, ContextId::NONE);
                block.is_freed_in_backward = false;
                block.start.step = failed.step.unwrap_or(BEFORE_STEPS);
                block.start.backward_passes =
                    passes_now.wrapping_add(block.start.backward_passes.wrapping_sub(passes_then));
                all.push(block);
            }
            RestEvent::FreeRequested(block) => {
                let (index, earlier) = match block {
                    RestBlock::New(number) => *new.get(number)?,
                    RestBlock::Old { seq, earlier, .. } => (find(*seq)?, find(*earlier)?),
                };
                let earlier = blocks[earlier];
                let block = &mut all[index];
                (block.freed, block.freed_context) = (seq, earlier.freed_context);
                block.is_freed_in_backward = earlier.is_freed_in_backward;
            }
            RestEvent::FreeCompleted(_) => {}
        }
    }
    Some(all)
}

/// State of fewer bytes is a counter, not a state of each value.
const SMALLEST_STATE: u64 = 4096;
/// State that belongs to no gradient is at most 5 % (1/20) of the state.
const UNMATCHED_STATE: u64 = 20;

/// The optimizer whose first step an error interrupted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InterruptedOptimizer {
    /// The number of state tensors for each gradient.
    pub(crate) states: u32,
    /// The number of copies of all gradients that `foreach=True` allocates at once.
    pub(crate) foreach: u32,
}

/// The blocks up to the request that failed in the optimizer's first step, the rest of its state, and the next forward
/// and backward pass. `is_node` is true if a context is that of an autograd node. `None` if the state does not follow
/// the gradients.
pub(crate) fn with_state(
    blocks: &[BlockLifetime],
    failed: &FailedRequest,
    optimizer: InterruptedOptimizer,
    is_node: impl Fn(ContextId) -> bool,
) -> Option<Vec<BlockLifetime>> {
    let start = u32::try_from(failed.seq).ok()?;
    let step = failed.step?;
    let mut rest = Rest { all: blocks.to_vec(), next: start };
    for block in rest.all.iter_mut().filter(|block| block.freed >= start && block.freed < NEVER) {
        (block.freed, block.freed_context) = (NEVER, ContextId::NONE);
    }
    let is_gradient = |block: &BlockLifetime| block.category == Category::Gradient && block.freed == NEVER;
    let gradients: Vec<usize> = (0..rest.all.len()).filter(|index| is_gradient(&rest.all[*index])).collect();
    let missing = missing_state(&rest.all, &gradients, optimizer.states)?;
    let like = rest.all[*gradients.first()?];
    let in_step = |requested: u64, category: Category| {
        let mut block = BlockLifetime::of_size(0, requested);
        (block.start.stack, block.start.context) = (failed.at.0, ContextId::NONE);
        (block.start.step, block.start.backward_passes, block.stream_pool) =
            (step, like.start.backward_passes, like.stream_pool);
        (block.category, block.start.phase) = (category, Phase::Optimizer);
        block
    };
    for size in missing {
        rest.allocate(in_step(size, Category::OptimizerState));
    }
    let copies = gradients.iter().cycle().take(gradients.len() * optimizer.foreach as usize);
    let sizes: Vec<u64> = copies.map(|index| rest.all[*index].requested()).collect();
    let temporaries: Vec<usize> =
        sizes.into_iter().map(|size| rest.allocate(in_step(size, Category::Temporary))).collect();
    temporaries.into_iter().chain(gradients).for_each(|index| rest.free(index, ContextId::NONE));
    rest.repeat(blocks, step, start, is_node);
    Some(rest.all)
}

/// The requested sizes of the state tensors that are still to come. `None` if there is more state than the gradients
/// explain.
fn missing_state(all: &[BlockLifetime], gradients: &[usize], states: u32) -> Option<Vec<u64>> {
    let needed: u64 = gradients.iter().map(|index| all[*index].requested() * u64::from(states)).sum();
    // By requested size: the state tensors without a block.
    let mut missing: BTreeMap<u64, i64> = BTreeMap::new();
    for index in gradients {
        *missing.entry(all[*index].requested()).or_default() += i64::from(states);
    }
    let state = all.iter().filter(|block| {
        block.category == Category::OptimizerState && block.freed == NEVER && block.requested() >= SMALLEST_STATE
    });
    let mut in_use = 0;
    for block in state {
        *missing.entry(block.requested()).or_default() -= 1;
        in_use += block.requested();
    }
    let still = needed.checked_sub(in_use)?;
    let unmatched: u64 = missing.iter().map(|(size, count)| size * count.min(&0).unsigned_abs()).sum();
    if unmatched <= in_use / UNMATCHED_STATE {
        let sizes = missing.into_iter().flat_map(|(size, count)| (0..count).map(move |_| size));
        return Some(sizes.collect());
    }
    // A block of gradients can belong to several parameters, each with state of its own. The sum counts.
    let part = |index: &usize| (u128::from(all[*index].requested()) * u128::from(still) / u128::from(needed)) as u64;
    Some(gradients.iter().flat_map(|index| (0..states).map(move |_| part(index))).collect())
}

/// Blocks to which the rest of a step is added.
struct Rest {
    all: Vec<BlockLifetime>,
    /// `seq` of the next event.
    next: u32,
}

impl Rest {
    fn allocate(&mut self, block: BlockLifetime) -> usize {
        let index = self.all.len();
        self.all.push(block);
        let block = &mut self.all[index];
        (block.allocated, block.freed, block.freed_context) = (self.next, NEVER, ContextId::NONE);
        self.next += 1;
        index
    }

    fn free(&mut self, index: usize, context: ContextId) {
        (self.all[index].freed, self.all[index].freed_context) = (self.next, context);
        self.next += 1;
    }

    /// Adds the forward and backward pass of `step` once more.
    fn repeat(&mut self, blocks: &[BlockLifetime], step: u32, until: u32, is_node: impl Fn(ContextId) -> bool) {
        let in_backward = |block: &BlockLifetime| is_in_passes(block, step) && block.start.phase == Phase::Backward;
        let ends = blocks.iter().flat_map(|block| {
            let freed = (block.freed < until && is_node(block.freed_context)).then_some(block.freed);
            [in_backward(block).then_some(block.allocated), freed]
        });
        let end = ends.flatten().max().unwrap_or(0);
        // Blocks that belong to the process exist already.
        let is_repeated = |block: &BlockLifetime| {
            let exists = block.freed >= until && belongs_to_process(block.category);
            is_in_passes(block, step) && block.allocated <= end && !exists
        };
        let mut events: Vec<(u32, bool, usize)> = Vec::new();
        for (index, block) in blocks.iter().enumerate().filter(|(_, block)| is_repeated(block)) {
            events.push((block.allocated, true, index));
            if block.freed <= end {
                events.push((block.freed, false, index));
            }
        }
        events.sort_unstable();
        let passes = events.iter().map(|(.., index)| blocks[*index].start.backward_passes).max().unwrap_or(0);
        let before = events.first().map_or(0, |(.., index)| blocks[*index].start.backward_passes);
        let mut new: HashMap<usize, usize> = HashMap::new();
        for (_, allocates, index) in events {
            let block = blocks[index];
            if allocates {
                let mut again = block;
                again.start.step = step + 1;
                again.start.backward_passes = passes.wrapping_add(block.start.backward_passes.wrapping_sub(before));
                let number = self.allocate(again);
                new.insert(index, number);
                // The new value of a variable replaces the old one.
                if block.freed > end && self.all[index].freed == NEVER {
                    self.free(index, ContextId::NONE);
                }
            } else if let Some(number) = new.get(&index) {
                self.free(*number, block.freed_context);
            }
        }
    }
}

/// Whether a block is of the forward or the backward pass of `step`.
fn is_in_passes(block: &BlockLifetime, step: u32) -> bool {
    let LifetimeStart { phase, step: own, .. } = block.start;
    own == step && !phase.is_forward_only() && !matches!(phase, Phase::Load | Phase::Optimizer)
}

/// Whether the blocks of a category that last to the end are those of the process, not of a step.
fn belongs_to_process(category: Category) -> bool {
    matches!(
        category,
        Category::Workspace | Category::Parameter | Category::CommunicationBucket | Category::OptimizerState
    )
}
