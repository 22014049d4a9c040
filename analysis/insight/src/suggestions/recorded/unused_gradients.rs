//! Gradients of parameters that no optimizer has: they stay from step to step, while the program clears the others.

use super::{Recorded, optimizer_step};
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime};

/// A gradient that outlives this many optimizer steps, all that follow, is used by none.
const OLD: usize = 3;

/// The indices of the gradients that outlive all optimizer steps, if the program clears at least as many bytes of
/// others after each step. In order.
pub(crate) fn unused_gradients(recorded: &Recorded<'_>) -> Vec<u32> {
    let steps: Vec<u32> = optimizer_step::ends(recorded).into_iter().map(|(_, seq)| seq).collect();
    let (mut unused, mut bytes, mut cleared) = (Vec::new(), 0, 0);
    for (index, block) in recorded.blocks.iter().enumerate().filter(|(_, block)| is_gradient(block)) {
        let before = |limit: u32| steps.partition_point(|seq| *seq < limit);
        let outlived = before(block.freed) - before(block.allocated);
        if outlived >= OLD && before(block.freed) == steps.len() {
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
