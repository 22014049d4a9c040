//! By phase and category, by how much each step changed the bytes in use.
//!
//! The category of a block is known when its lifetime ends, which can be long after the step that allocated it. So the
//! changes of a step are complete at the end of the recording.

use super::category::{BlockAllocation, Category};
use super::phase::Phase;

/// The row of the gradients that are cleared before the first pass of a step, after those of the phases.
pub(super) const CLEARED: usize = Phase::ALL.len();

/// The bytes that were allocated minus those that were freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Change {
    /// Rounded bytes.
    pub bytes: i64,
    /// Requested bytes.
    pub requested: i64,
}

impl Change {
    /// The change by a block that is allocated.
    pub(super) fn of(block: &BlockAllocation) -> Change {
        Change { bytes: block.memory.size as i64, requested: block.memory.requested as i64 }
    }

    pub(super) fn add(&mut self, other: Change) {
        self.bytes += other.bytes;
        self.requested += other.requested;
    }

    pub(super) fn negated(self) -> Change {
        Change { bytes: -self.bytes, requested: -self.requested }
    }
}

/// Indexed by category.
type Categories = [Change; Category::ALL.len()];

/// The changes of some steps.
#[derive(Clone, Debug, Default)]
pub(super) struct StepChanges {
    /// In the order of the steps.
    steps: Vec<(u32, Box<[Categories; CLEARED + 1]>)>,
}

impl StepChanges {
    /// Adds a change in this row of a step.
    #[inline]
    pub(super) fn add(&mut self, step: u32, row: usize, category: Category, change: Change) {
        self.of_mut(step)[row][category as usize].add(change);
    }

    /// Moves what a row has so far to another one.
    pub(super) fn move_row(&mut self, step: u32, from: usize, to: usize) {
        let rows = self.of_mut(step);
        rows[to] = std::mem::take(&mut rows[from]);
    }

    #[inline]
    fn of_mut(&mut self, step: u32) -> &mut [Categories; CLEARED + 1] {
        // Most blocks live within one step.
        let at = match self.steps.last() {
            Some((last, _)) if *last == step => self.steps.len() - 1,
            _ => self.steps.binary_search_by_key(&step, |(step, _)| *step).unwrap_or_else(|at| {
                self.steps.insert(at, (step, Box::default()));
                at
            }),
        };
        &mut self.steps[at].1
    }

    /// The number of steps.
    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    /// Forgets the other steps.
    pub(super) fn retain(&mut self, is_kept: impl Fn(u32) -> bool) {
        self.steps.retain(|(step, _)| is_kept(*step));
    }

    /// The sum of these rows of a step: the categories that have changed, in the order of the categories.
    pub(super) fn of(&self, step: u32, rows: &[usize]) -> Vec<(Category, Change)> {
        let Ok(at) = self.steps.binary_search_by_key(&step, |(step, _)| *step) else { return Vec::new() };
        let sum = |category: Category| {
            let mut sum = Change::default();
            rows.iter().for_each(|row| sum.add(self.steps[at].1[*row][category as usize]));
            (category, sum)
        };
        Category::ALL.into_iter().map(sum).filter(|(_, change)| change.bytes != 0).collect()
    }
}
