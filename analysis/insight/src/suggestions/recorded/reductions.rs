//! Buffers of reductions.
//!
//! A reduction that several thread blocks share allocates a buffer for their partial sums, then a smaller one for their
//! semaphores, and frees both at once (`gpu_reduce_kernel` in PyTorch's Reduce.cuh). The number of thread blocks, and so
//! the buffer's size, follows from the multiprocessors of the GPU.

use std::collections::HashSet;

use crate::passes::lifetimes::{BlockLifetime, NEVER};

/// The events that allocated such buffers. `blocks`: in the order of their allocations.
pub(super) fn reduction_buffers(blocks: &[BlockLifetime]) -> HashSet<u32> {
    let mut buffers = HashSet::new();
    for (index, [buffer, semaphores]) in blocks.array_windows().enumerate() {
        let is_one_place =
            (buffer.start.stack, buffer.start.context) == (semaphores.start.stack, semaphores.start.context);
        let next = blocks.get(index + 2).map_or(NEVER, |next| next.allocated);
        let are_freed = semaphores.freed < buffer.freed && buffer.freed < next;
        if is_one_place && are_freed && semaphores.requested() < buffer.requested() {
            buffers.insert(buffer.allocated);
        }
    }
    buffers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_freed_with_its_semaphores_before_anything_is_allocated() {
        let block = |allocated, freed, bytes| {
            let mut block = BlockLifetime::of_size(allocated, bytes);
            block.freed = freed;
            block
        };
        let reduction = [block(1, 4, 1 << 20), block(2, 3, 512), block(5, 9, 64)];
        assert_eq!(reduction_buffers(&reduction), HashSet::from([1]));
        // The second block is a result, and the first is freed after another allocation.
        assert_eq!(reduction_buffers(&[block(1, 3, 1 << 20), block(2, 9, 512)]), HashSet::new());
        assert_eq!(reduction_buffers(&[block(1, 6, 1 << 20), block(2, 3, 512), block(5, 9, 64)]), HashSet::new());
    }
}
