//! The rank of this process in a distributed job, as the program gave it to PyTorch (`torch::rank`). A forked
//! child keeps its parent's rank.

use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_trace::definition::Definition;

/// The number of ranks in the upper half, the rank in the lower half. 0 before it is known.
static RANK: AtomicU64 = AtomicU64::new(0);

/// Sets the rank. Returns `true` for the first valid pair of rank and size.
pub(crate) fn set(rank: i32, size: i32) -> bool {
    let (Ok(rank), Ok(size)) = (u32::try_from(rank), u32::try_from(size)) else { return false };
    let both = u64::from(size) << 32 | u64::from(rank);
    rank < size && RANK.compare_exchange(0, both, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// The definition for the trace. `None` before the rank is known.
pub(crate) fn definition() -> Option<Definition<'static>> {
    let known = RANK.load(Ordering::Relaxed);
    (known != 0).then_some(Definition::Rank { rank: known as u32, size: (known >> 32) as u32 })
}
