//! What all processes of one run may take of the launcher's memory together. What one process may is bounded where it is taken; but
//! processes are cheap, and there may be thousands.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::process::Process;
use super::writer::Queue;

/// Texts about processes that are kept until the manifest is written, in bytes. The traces have all of them.
const KEPT_TEXT: u64 = 64 << 20;
/// Threads that are told apart, over all living processes: about 200 MiB.
const THREADS: u64 = 1 << 20;
/// Places in reorder windows, over all processes: 80 MiB. Together they hold no more than twice that.
const PLACES: usize = 1 << 20;
/// What a process keeps of its window when it held more than its share and all are used: 80 KiB.
const PLACES_OF_ONE: usize = 1 << 10;

/// An amount of something that is shared.
#[derive(Clone, Debug)]
pub(super) struct Budget(Arc<AtomicU64>);

impl Budget {
    fn new(amount: u64) -> Budget {
        Budget(Arc::new(AtomicU64::new(amount)))
    }

    /// Takes so much, if there is so much left.
    pub(super) fn take(&self, amount: u64) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(amount)).is_ok()
    }

    /// Gives so much back.
    pub(super) fn give_back(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }
}

/// The budgets of one run.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// Bytes of text kept until the end.
    pub(super) kept_text: Budget,
    /// Threads told apart.
    pub(super) threads: Budget,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { kept_text: Budget::new(KEPT_TEXT), threads: Budget::new(THREADS) }
    }
}

/// The places that all reorder windows hold, in one round over the processes.
#[derive(Debug)]
pub(super) struct Places {
    held: usize,
    share: usize,
}

impl Places {
    /// As it stands before the round.
    pub(super) fn of<'a>(processes: impl ExactSizeIterator<Item = &'a Process>) -> Places {
        let share = PLACES / processes.len().max(1);
        Places { held: processes.map(Process::places).sum(), share: share.max(PLACES_OF_ONE) }
    }

    /// Does what changes the process's window. Where all hold too many by then, and this one more than its share, it gives up its gaps.
    pub(super) fn watch<T>(
        &mut self,
        process: &mut Process,
        queue: &Queue,
        change: impl FnOnce(&mut Process) -> T,
    ) -> T {
        self.held = self.held.saturating_sub(process.places());
        let result = change(process);
        if self.held + process.places() > PLACES && process.places() > self.share {
            process.keep_places(PLACES_OF_ONE, queue);
        }
        self.held += process.places();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_there_is() {
        let budget = Budget::new(10);
        let shared = budget.clone();
        assert!(budget.take(7) && !shared.take(4) && shared.take(3) && !budget.take(1));
        shared.give_back(2);
        assert!(budget.take(2) && !budget.take(1));
    }
}
