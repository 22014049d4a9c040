//! What each phase of each step allocated, freed and kept, and its peak.
//!
//! A long run has many steps. The first steps, the last steps and the step with the peak are kept row by row. All
//! others count only in the sums.
//!
//! Some frees are tied to a phase only by their position. These are frees while no Python frame runs, and frees of
//! older blocks by user code. They are held back until the next allocation. If none follows, the program was ending,
//! and its teardown does not count for the last step.

use std::collections::VecDeque;

use super::phase::Phase;

/// The number of first and of last steps that are kept row by row.
const KEPT_STEPS: usize = 16;

/// One phase of one step, or of many steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PhaseRow {
    /// The number of blocks allocated.
    pub allocations: u64,
    /// The number of bytes allocated.
    pub allocated: u64,
    /// The number of blocks freed.
    pub frees: u64,
    /// The number of bytes freed.
    pub freed: u64,
    /// The highest number of allocated bytes during the phase.
    pub peak: u64,
    /// Allocated bytes after the last event of the phase.
    pub after: u64,
}

impl PhaseRow {
    /// Whether the phase allocated and freed nothing.
    pub fn is_empty(&self) -> bool {
        self.allocations == 0 && self.frees == 0
    }

    /// Allocated minus freed bytes.
    pub fn net(&self) -> i64 {
        self.allocated as i64 - self.freed as i64
    }

    fn absorb(&mut self, other: &PhaseRow) {
        if other.is_empty() {
            return;
        }
        self.allocations += other.allocations;
        self.allocated += other.allocated;
        self.frees += other.frees;
        self.freed += other.freed;
        self.peak = self.peak.max(other.peak);
        self.after = other.after;
    }
}

/// All phases of one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepRows {
    /// The step; `None` before the first step.
    pub step: Option<u32>,
    /// Indexed by [`Phase`].
    pub phases: [PhaseRow; Phase::ALL.len()],
    /// The time of the first and of the last event, in clock ticks.
    pub ticks: (u64, u64),
}

impl StepRows {
    /// The highest number of allocated bytes in the step.
    pub fn peak(&self) -> u64 {
        self.phases.iter().map(|p| p.peak).max().unwrap_or(0)
    }

    fn absorb(&mut self, other: &StepRows) {
        for (sum, row) in self.phases.iter_mut().zip(&other.phases) {
            sum.absorb(row);
        }
    }
}

/// Collects the rows while a recording streams. Events must come in order.
#[derive(Clone, Debug, Default)]
pub struct PhaseTable {
    current: StepRows,
    before: StepRows,
    first: Vec<StepRows>,
    last: VecDeque<StepRows>,
    highest: Option<StepRows>,
    later: StepRows,
    total: StepRows,
    steps: u32,
    level: u64,
    pending_frees: [PhaseRow; Phase::ALL.len()],
    has_pending_frees: bool,
}

impl PhaseTable {
    /// Takes an allocation of `bytes` bytes. `level`: allocated bytes after it.
    #[inline]
    pub fn alloc(&mut self, step: Option<u32>, phase: Phase, ticks: u64, bytes: u64, level: u64) {
        self.settle_pending_frees();
        let row = self.row(step, phase, ticks);
        row.allocations += 1;
        row.allocated += bytes;
        row.peak = row.peak.max(level);
        row.after = level;
        self.level = level;
    }

    /// Takes a free of `bytes` bytes. `level`: allocated bytes after it.
    #[inline]
    pub fn free(&mut self, step: Option<u32>, phase: Phase, ticks: u64, bytes: u64, level: u64) {
        let before = self.level;
        let row = self.row(step, phase, ticks);
        row.frees += 1;
        row.freed += bytes;
        // A phase that only frees has its peak at its beginning.
        row.peak = row.peak.max(before);
        row.after = level;
        self.level = level;
    }

    /// Takes a free that only its position ties to `phase`. It is held back until the next allocation.
    pub fn free_maybe_teardown(&mut self, phase: Phase, bytes: u64, level: u64) {
        self.has_pending_frees = true;
        let row = &mut self.pending_frees[phase as usize];
        row.frees += 1;
        row.freed += bytes;
        row.peak = row.peak.max(self.level);
        row.after = level;
        self.level = level;
    }

    /// Bytes of the frees that are still held back: the teardown after the last allocation.
    pub fn freed_at_exit(&self) -> u64 {
        self.pending_frees.iter().map(|row| row.freed).sum()
    }

    #[inline]
    fn settle_pending_frees(&mut self) {
        if std::mem::take(&mut self.has_pending_frees) {
            self.commit_pending_frees();
        }
    }

    fn commit_pending_frees(&mut self) {
        for (row, pending) in self.current.phases.iter_mut().zip(&mut self.pending_frees) {
            row.absorb(&std::mem::take(pending));
        }
    }

    #[inline]
    fn row(&mut self, step: Option<u32>, phase: Phase, ticks: u64) -> &mut PhaseRow {
        if step != self.current.step {
            self.close_step();
            self.current = StepRows { step, ticks: (ticks, ticks), ..StepRows::default() };
        }
        self.current.ticks.1 = ticks;
        &mut self.current.phases[phase as usize]
    }

    fn close_step(&mut self) {
        let rows = std::mem::take(&mut self.current);
        self.total.absorb(&rows);
        let Some(step) = rows.step else {
            self.before.absorb(&rows);
            return;
        };
        self.steps = self.steps.max(step + 1);
        if step > 0 {
            self.later.absorb(&rows);
        }
        if self.highest.as_ref().is_none_or(|h| rows.peak() > h.peak()) {
            self.highest = Some(rows);
        }
        if self.first.len() < KEPT_STEPS {
            self.first.push(rows);
        } else {
            self.last.push_back(rows);
            if self.last.len() > KEPT_STEPS {
                self.last.pop_front();
            }
        }
    }

    /// Ends the recording. If nothing was computed after the last step (only a barrier or a report ran), that work
    /// began no step. It counts as phase "other" of the last step.
    pub fn finish(&mut self) {
        let computes = [Phase::Forward, Phase::Backward, Phase::Optimizer, Phase::Eval, Phase::Recompute];
        let computed = computes.iter().any(|phase| !self.current.phases[*phase as usize].is_empty());
        if computed || self.current.step.is_none_or(|step| step == 0) {
            self.close_step();
            return;
        }
        let rows = std::mem::take(&mut self.current);
        let mut rest = PhaseRow::default();
        for row in &rows.phases {
            rest.absorb(row);
        }
        let last = self.last.back_mut().or(self.first.last_mut());
        let later = (self.steps > 1).then_some(&mut self.later);
        for sum in [last, later, Some(&mut self.total)].into_iter().flatten() {
            sum.phases[Phase::Other as usize].absorb(&rest);
        }
    }

    /// States that there were at least `steps` steps, even if some of them allocated nothing.
    pub fn at_least(&mut self, steps: u32) {
        self.steps = self.steps.max(steps);
    }

    /// The number of steps.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// What happened before the first step.
    pub fn before(&self) -> &StepRows {
        &self.before
    }

    /// The first step.
    pub fn first(&self) -> Option<&StepRows> {
        self.first.first()
    }

    /// The sum of the steps after the first, and their number. Peaks are maxima; levels are those of the last step.
    pub fn later(&self) -> (&StepRows, u32) {
        (&self.later, self.steps.saturating_sub(1))
    }

    /// The sum of everything.
    pub fn total(&self) -> &StepRows {
        &self.total
    }

    /// The steps that are kept row by row, in order.
    pub fn kept(&self) -> Vec<&StepRows> {
        let mut all: Vec<&StepRows> = self.first.iter().chain(&self.last).collect();
        if let Some(highest) = &self.highest
            && all.iter().all(|rows| rows.step != highest.step)
        {
            all.push(highest);
            all.sort_by_key(|rows| rows.step);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_add_up() {
        let mut table = PhaseTable::default();
        table.alloc(None, Phase::Load, 1, 100, 100);
        for step in 0..100 {
            let extra = if step == 50 { 1000 } else { 0 };
            table.alloc(Some(step), Phase::Forward, 2, 50 + extra, 150 + extra);
            table.free(Some(step), Phase::Backward, 3, 50 + extra, 100);
        }
        table.finish();
        assert_eq!(table.steps(), 100);
        assert_eq!(table.before().phases[Phase::Load as usize].net(), 100);
        let forward = table.first().unwrap().phases[Phase::Forward as usize];
        assert_eq!((forward.allocated, forward.net(), forward.peak, forward.after), (50, 50, 150, 150));
        let (later, count) = table.later();
        assert_eq!(count, 99);
        assert_eq!(later.phases[Phase::Backward as usize].freed, 99 * 50 + 1000);
        let kept = table.kept();
        assert_eq!(kept.len(), 2 * KEPT_STEPS + 1);
        assert!(kept.iter().any(|rows| rows.step == Some(50) && rows.peak() == 1150));
    }

    #[test]
    fn work_without_computation_after_the_last_step_is_not_a_step() {
        let mut table = PhaseTable::default();
        table.alloc(Some(0), Phase::Forward, 1, 100, 100);
        table.alloc(Some(1), Phase::Optimizer, 2, 10, 110);
        table.alloc(Some(2), Phase::Data, 3, 5, 115);
        table.finish();
        assert_eq!(table.steps(), 2);
        assert_eq!(table.later().0.phases[Phase::Other as usize].allocated, 5);
        assert_eq!(table.kept()[1].phases[Phase::Other as usize].allocated, 5);
    }

    #[test]
    fn the_teardown_does_not_count_for_the_last_step() {
        let mut table = PhaseTable::default();
        table.alloc(Some(0), Phase::Forward, 1, 100, 100);
        table.free_maybe_teardown(Phase::Other, 40, 60);
        table.alloc(Some(0), Phase::Forward, 2, 10, 70);
        table.free_maybe_teardown(Phase::Forward, 70, 0);
        table.finish();
        assert_eq!(table.first().unwrap().phases[Phase::Other as usize].freed, 40);
        assert_eq!(table.freed_at_exit(), 70);
        assert_eq!(table.first().unwrap().phases[Phase::Forward as usize].freed, 0);
    }
}
