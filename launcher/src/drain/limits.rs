//! Limits on the launcher's memory that all processes of one run share.
//!
//! Each process has its own limits where the memory is taken. Those are not enough, because a run may have thousands of
//! processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of text about processes that are kept until the manifest is written. The trace files contain all of it.
const MAX_KEPT_TEXT: u64 = 64 << 20;
/// The number of threads with an id of their own, over all living processes: about 200 MiB.
const MAX_THREADS: u64 = 1 << 20;

/// A shared amount that clones draw from together.
#[derive(Clone, Debug)]
pub(super) struct Budget(Arc<AtomicU64>);

impl Budget {
    fn new(amount: u64) -> Budget {
        Budget(Arc::new(AtomicU64::new(amount)))
    }

    /// Subtracts `amount` if that much is left, and returns whether it was.
    pub(super) fn take(&self, amount: u64) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(amount)).is_ok()
    }

    /// Returns `amount` to the budget.
    pub(super) fn give_back(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }
}

/// The budgets of one run.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// Bytes of text kept until the manifest is written.
    pub(super) kept_text: Budget,
    /// Threads with an id of their own.
    pub(super) threads: Budget,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { kept_text: Budget::new(MAX_KEPT_TEXT), threads: Budget::new(MAX_THREADS) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_gives_no_more_than_it_has() {
        let budget = Budget::new(10);
        let shared = budget.clone();
        assert!(budget.take(7) && !shared.take(4) && shared.take(3) && !budget.take(1));
        shared.give_back(2);
        assert!(budget.take(2) && !budget.take(1));
    }
}
