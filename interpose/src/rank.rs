//! Which rank of a distributed job this process is, where it told PyTorch (see `hooks::torch::rank`). A forked child keeps its parent's, as
//! it keeps its environment.

use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_trace::definition::Definition;

/// The number of ranks (upper half) and the rank; 0 until it is known.
static RANK: AtomicU64 = AtomicU64::new(0);

/// The process says so. True for the first time that it says something that can be.
pub(crate) fn set(rank: i32, size: i32) -> bool {
    let (Ok(rank), Ok(size)) = (u32::try_from(rank), u32::try_from(size)) else { return false };
    let both = u64::from(size) << 32 | u64::from(rank);
    rank < size && RANK.compare_exchange(0, both, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// What there is to tell the launcher.
pub(crate) fn definition() -> Option<Definition<'static>> {
    let known = RANK.load(Ordering::Relaxed);
    (known != 0).then_some(Definition::Rank { rank: known as u32, size: (known >> 32) as u32 })
}
