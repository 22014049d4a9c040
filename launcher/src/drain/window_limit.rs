//! The limit on the memory of all reorder windows of one run.

use super::process::Process;
use super::writer::Queue;

/// Places in the reorder windows of all processes: 80 MiB. Together the windows never hold more than twice that.
const MAX_PLACES: usize = 1 << 20;
/// Places that a process over its share keeps when all places are in use: 80 KiB.
const MIN_PLACES: usize = 1 << 10;

/// The limit on the places of all reorder windows, during one round over the processes.
#[derive(Debug)]
pub(super) struct WindowLimit {
    held: usize,
    share: usize,
}

impl WindowLimit {
    /// Counts the places at the start of a round.
    pub(super) fn of<'a>(processes: impl ExactSizeIterator<Item = &'a Process>) -> WindowLimit {
        let share = MAX_PLACES / processes.len().max(1);
        WindowLimit { held: processes.map(Process::places).sum(), share: share.max(MIN_PLACES) }
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
