//! Which steps and which passes without gradients belong to training.

use std::collections::{HashMap, HashSet};

use memtrace_trace::ids::StackId;

use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime};
use crate::passes::phase::Phase;

/// The stacks that allocate in forward passes without gradients before the backward pass of every step, of two at
/// least. Their batch is that of the step.
pub(crate) fn forward_only_in_each_step(blocks: &[BlockLifetime]) -> HashSet<StackId> {
    let mut backward: HashMap<u32, u32> = HashMap::new();
    for block in blocks.iter().filter(|b| b.start.phase == Phase::Backward && b.start.step != BEFORE_STEPS) {
        backward.entry(block.start.step).or_insert(block.allocated);
    }
    let first = backward.keys().min().copied().unwrap_or(0);
    let mut steps: HashMap<StackId, HashSet<u32>> = HashMap::new();
    for block in blocks.iter().filter(|block| block.start.phase.is_forward_only()) {
        // Steps are counted from the first forward pass with gradients on.
        let step = if block.start.step == BEFORE_STEPS { first } else { block.start.step };
        if backward.get(&step).is_some_and(|begins| block.allocated < *begins) {
            steps.entry(block.start.stack).or_default().insert(step);
        }
    }
    steps.retain(|_, steps| steps.len() > 1 && steps.len() == backward.len());
    steps.into_keys().collect()
}

/// The steps with forward passes and without a backward pass in a run that has them: what autograd recorded there was
/// an evaluation without `torch.no_grad()`. `is_interrupted` means that the last step can lack its backward pass.
pub(crate) fn evaluated_steps(blocks: &[BlockLifetime], is_interrupted: bool) -> HashSet<u32> {
    let in_steps = || blocks.iter().filter(|block| block.start.step != BEFORE_STEPS);
    let steps = |phase: Phase| in_steps().filter(move |b| b.start.phase == phase).map(|b| b.start.step).collect();
    let (trained, mut evaluated): (HashSet<u32>, HashSet<u32>) = (steps(Phase::Backward), steps(Phase::Forward));
    evaluated.retain(|step| !trained.contains(step));
    if let Some(last) = in_steps().map(|block| block.start.step).max().filter(|_| is_interrupted) {
        evaluated.remove(&last);
    }
    if trained.is_empty() { HashSet::new() } else { evaluated }
}
