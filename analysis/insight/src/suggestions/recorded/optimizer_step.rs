//! The optimizer's step.

use super::Recorded;
use super::span::Span;
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime};
use crate::passes::phase::Phase;
use crate::rules::OptimizerRule;

/// Optimizers with `fused=True` on a GPU.
const FUSED: [&str; 3] = ["Adam", "AdamW", "SGD"];

/// Whether the block is a temporary of an optimizer's step.
pub(crate) fn in_step(recorded: &Recorded<'_>, block: &BlockLifetime) -> bool {
    block.start.phase == Phase::Optimizer
        && block.category == Category::Temporary
        && recorded.table.facts(block.start.stack).optimizer.is_some()
}

/// The optimizer that most state or temporaries belong to; `None` without optimizers, or with several.
pub(crate) fn optimizer(recorded: &Recorded<'_>) -> Option<&'static OptimizerRule> {
    let is_used = |b: &&BlockLifetime| b.start.phase == Phase::Optimizer;
    let mut all = recorded.blocks.iter().filter(is_used).filter_map(|b| recorded.table.facts(b.start.stack).optimizer);
    let first = all.next()?;
    all.all(|other| other.name == first.name).then_some(first)
}

/// Whether all classes that a name lists (`Adam or AdamW`) are in `known`. Classes of other libraries can share the
/// code of PyTorch's without their options.
pub(crate) fn are_all(name: &str, known: &[&str]) -> bool {
    name.split(" or ").all(|class| known.contains(&class))
}

/// Whether the optimizer with this name can run fused.
pub(crate) fn can_fuse(name: &str) -> bool {
    are_all(name, &FUSED)
}

/// The optimizers' steps in order: the step of the program, and `seq` of the last allocation of its optimizer.
pub(crate) fn ends(recorded: &Recorded<'_>) -> Vec<(u32, u32)> {
    let mut ends: Vec<(u32, u32)> = Vec::new();
    for event in recorded.events.iter().filter(|event| event.allocates) {
        let start = &recorded.blocks[event.block as usize].start;
        if start.phase == Phase::Optimizer && start.step != BEFORE_STEPS {
            match ends.last_mut() {
                Some((step, last)) if *step == start.step => *last = event.seq,
                _ => ends.push((start.step, event.seq)),
            }
        }
    }
    ends
}

/// Removes the temporaries of the optimizer's step.
pub(crate) fn remove_temporaries(recorded: &Recorded<'_>, spans: &mut [Span]) {
    for span in spans.iter_mut() {
        if in_step(recorded, &recorded.blocks[span.block as usize]) {
            span.vanish();
        }
    }
}
