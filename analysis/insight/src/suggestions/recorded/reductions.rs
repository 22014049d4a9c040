//! Buffers of reductions.
//!
//! A reduction that several thread blocks share allocates a buffer for their partial sums, then a smaller one for their
//! semaphores, and frees both at once (`gpu_reduce_kernel` in PyTorch's Reduce.cuh). The number of thread blocks
//! follows from the batch, or, if that is large, from the multiprocessors of the GPU: such a buffer of half the batch
//! has between half of its bytes and all.

use std::collections::HashSet;

use memtrace_trace::file::Definitions;

use crate::passes::lifetimes::{BlockLifetime, NEVER};
use crate::rules::multiprocessors;

/// Each thread block has at least so many bytes of the buffer.
const SMALLEST_PART: u64 = 1024;

/// The events that allocated buffers whose size follows from the multiprocessors. `blocks` are in the order of their
/// allocations. Empty if the model of the GPU is not known.
pub(super) fn reduction_buffers(blocks: &[BlockLifetime], definitions: &Definitions) -> HashSet<u32> {
    let gpu = definitions.devices.values().next();
    gpu.and_then(|gpu| multiprocessors(&gpu.name)).map(|count| buffers_of_all(blocks, count.into())).unwrap_or_default()
}

fn buffers_of_all(blocks: &[BlockLifetime], multiprocessors: u64) -> HashSet<u32> {
    let mut buffers = HashSet::new();
    for (index, [buffer, semaphores]) in blocks.array_windows().enumerate() {
        let is_one_place =
            (buffer.start.stack, buffer.start.context) == (semaphores.start.stack, semaphores.start.context);
        let next = blocks.get(index + 2).map_or(NEVER, |next| next.allocated);
        let are_freed = semaphores.freed < buffer.freed && buffer.freed < next;
        let is_of_all = buffer.requested().is_multiple_of(multiprocessors * SMALLEST_PART);
        if is_one_place && are_freed && is_of_all && semaphores.requested() < buffer.requested() {
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
        let found = |blocks: &[BlockLifetime]| buffers_of_all(blocks, 132);
        let reduction = [block(1, 4, 132 << 20), block(2, 3, 512), block(5, 9, 64)];
        assert_eq!(found(&reduction), HashSet::from([1]));
        // The second block is a result, and the first is freed after another allocation.
        assert_eq!(found(&[block(1, 3, 132 << 20), block(2, 9, 512)]), HashSet::new());
        assert_eq!(found(&[block(1, 6, 132 << 20), block(2, 3, 512), block(5, 9, 64)]), HashSet::new());
        // The batch decides.
        assert_eq!(found(&[block(1, 4, 128 << 20), block(2, 3, 512), block(5, 9, 64)]), HashSet::new());
    }
}
