//! Gradients of parameters that no optimizer has: they stay from step to step, while the program clears the others.

use super::Recorded;
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime};
use crate::passes::phase::Phase;

/// A gradient that outlives this many optimizer steps, all that follow, is used by none.
const OLD: usize = 3;

/// The indices of the gradients that outlive all optimizer steps, if the program clears at least as many bytes of
/// others after each step. In order.
pub(crate) fn unused_gradients(recorded: &Recorded<'_>) -> Vec<u32> {
    let steps = optimizer_steps(recorded);
    let (mut unused, mut bytes, mut cleared) = (Vec::new(), 0, 0);
    for (index, block) in recorded.blocks.iter().enumerate().filter(|(_, block)| is_gradient(block)) {
        let outlived =
            steps.partition_point(|seq| *seq < block.freed) - steps.partition_point(|seq| *seq < block.allocated);
        let follow = steps.len() - steps.partition_point(|seq| *seq < block.allocated);
        if outlived >= OLD && outlived == follow {
            unused.push(index as u32);
            bytes += block.size();
        } else if outlived <= 1 {
            cleared += block.size();
        }
    }
    if cleared < bytes {
        unused.clear();
    }
    unused
}

fn is_gradient(block: &BlockLifetime) -> bool {
    block.category == Category::Gradient && block.start.step != BEFORE_STEPS
}

/// `seq` of the last allocation of each optimizer step.
fn optimizer_steps(recorded: &Recorded<'_>) -> Vec<u32> {
    let in_optimizer =
        |block: &&BlockLifetime| block.start.phase == Phase::Optimizer && block.start.step != BEFORE_STEPS;
    let blocks: Vec<&BlockLifetime> = recorded.blocks.iter().filter(in_optimizer).collect();
    let steps = blocks.chunk_by(|a, b| a.start.step == b.start.step);
    steps.map(|blocks| blocks[blocks.len() - 1].allocated).collect()
}
