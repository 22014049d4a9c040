//! Limits on the launcher's memory that all processes of one run share.
//!
//! Each process has its own limits where the memory is taken. Those are not enough, because a run may have thousands of
//! processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::process::Process;
use super::writer::Queue;

/// Bytes of text about processes that are kept until the manifest is written. The trace files contain all of it.
const MAX_KEPT_TEXT: u64 = 64 << 20;
/// The number of threads with an id of their own, over all living processes: about 200 MiB.
const MAX_THREADS: u64 = 1 << 20;
/// Places in the reorder windows of all processes: 80 MiB. Together the windows never hold more than twice that.
const MAX_PLACES: usize = 1 << 20;
/// Places that a process over its share keeps when all places are in use: 80 KiB.
const MIN_PLACES: usize = 1 << 10;

/// A shared amount that clones draw from together.
#[derive(Clone, Debug)]
pub(super) struct Budget(Arc<AtomicU64>);

impl Budget {
    fn new(amount: u64) -> Budget {
        Budget(Arc::new(AtomicU64::new(amount)))
    }

    /// Takes `amount` if that much is left, and returns whether it was.
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

/// The places that all reorder windows hold, during one round over the processes.
#[derive(Debug)]
pub(super) struct Places {
    held: usize,
    share: usize,
}

impl Places {
    /// Counts the places at the start of a round.
    pub(super) fn of<'a>(processes: impl ExactSizeIterator<Item = &'a Process>) -> Places {
        let share = MAX_PLACES / processes.len().max(1);
        Places { held: processes.map(Process::places).sum(), share: share.max(MIN_PLACES) }
    }

    /// Runs `change` on the process and accounts for its window afterwards.
    ///
    /// When all windows exceed the limit and this process exceeds its share, its oldest gaps are given up.
    pub(super) fn update<T>(
        &mut self,
        process: &mut Process,
        queue: &Queue,
        change: impl FnOnce(&mut Process) -> T,
    ) -> T {
        self.held = self.held.saturating_sub(process.places());
        let result = change(process);
        if self.held + process.places() > MAX_PLACES && process.places() > self.share {
            process.keep_places(MIN_PLACES, queue);
        }
        self.held += process.places();
        result
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
