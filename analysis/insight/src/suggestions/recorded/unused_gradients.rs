//! Gradients of parameters that no optimizer has: they stay from step to step, while the program clears the others.

use super::{Recorded, optimizer_step};
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime};

/// A gradient that outlives this many optimizer steps, all that follow, is used by none.
const OLD: usize = 3;
/// The same limit where the program clears fewer bytes of other gradients. One optimizer can step five times for each
/// step of another.
const OLD_WITHOUT_STATE: usize = 6;
/// The same limit if no optimizer keeps state.
const VERY_OLD: usize = 12;

/// The indices of the gradients that outlive all optimizer steps, while the program clears others after each step: at
/// least as many bytes, or optimizers keep state only for others, or after many steps. In order.
pub(crate) fn unused_gradients(recorded: &Recorded<'_>) -> Vec<u32> {
    let steps: Vec<u32> = optimizer_step::ends(recorded).into_iter().map(|(_, seq)| seq).collect();
    let (mut unused, mut surely_unused, mut bytes, mut cleared) = (Vec::new(), Vec::new(), 0, 0);
    for (index, block) in recorded.blocks.iter().enumerate().filter(|(_, block)| is_gradient(block)) {
        let before = |limit: u32| steps.partition_point(|seq| *seq < limit);
        let outlived = before(block.freed) - before(block.allocated);
        if outlived >= OLD && before(block.freed) == steps.len() {
            unused.push(index as u32);
            bytes += block.size();
            let has_no_state = || outlived >= OLD_WITHOUT_STATE && recorded.has_no_optimizer_state(block);
            if outlived >= VERY_OLD || has_no_state() {
                surely_unused.push(index as u32);
            }
        } else if outlived <= 1 {
            cleared += block.size();
        }
    }
    match cleared {
        0 => Vec::new(),
        cleared if cleared < bytes => surely_unused,
        _ => unused,
    }
}

fn is_gradient(block: &BlockLifetime) -> bool {
    block.category == Category::Gradient && block.start.step != BEFORE_STEPS
}
