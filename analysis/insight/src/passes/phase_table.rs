//! The memory that each phase of each step allocated, freed and kept, and its peak.
//!
//! A long run has many steps. The first steps, the last steps, the step with the peak and a sample of all steps are
//! kept row by row. All others count only in the sums.
//!
//! Some frees are tied to a phase only by their position. These are frees while no Python frame runs, and frees of
//! older blocks by user code. They are held back until the next allocation. If none follows, the program was ending,
//! and its teardown does not count for the last step.
//!
//! Phases are listed in the order of their first allocations in the step. A phase that only frees is listed where its
//! first free is. Gradients that are cleared before the first pass of a step are a part of their own: clearing them
//! does not move the optimizer's row there.
//!
//! Phases can take turns: recomputation and backward pass, forward passes and an evaluation between them. Then a row's
//! levels do not differ by what its phase changed. [`PhaseTable::joined_phases`] joins such phases, so that each part
//! of a step begins and ends with the bytes that its changes lead to.

use std::collections::VecDeque;

use super::category::Category;
use super::pass::{BlockAllocated, BlockFreed, LifetimeEnded, Pass, RecordingEnd, RecordingStart};
use super::phase::Phase;
use super::step_changes::{CLEARED, Change, StepChanges};

/// The number of first and of last steps that are kept row by row.
const KEPT_STEPS: usize = 16;
/// The maximum number of steps in the sample of all steps.
const SAMPLED_STEPS: usize = 64;
/// The changes of at most this many steps are in memory: more than the rows of steps.
const CHANGED_STEPS: usize = 4 * SAMPLED_STEPS;

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
    /// Allocated bytes before the first event of the phase.
    pub start: u64,
    /// The highest number of allocated bytes during the phase.
    pub peak: u64,
    /// Allocated bytes after the last event of the phase.
    pub after: u64,
    /// The number of steps in which the phase allocated or freed something.
    pub steps: u32,
    /// How often other phases gave way to this one.
    pub turns: u32,
    /// The number of its first event.
    first: u64,
    /// Where the phase is in the order of its step: the number of its first allocation or else of its first free.
    began: u64,
    /// The number of its last event.
    ended: u64,
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

    /// Adds an allocation of `bytes` bytes. `before` and `level`: allocated bytes before and after it.
    #[inline]
    pub fn alloc(&mut self, bytes: u64, before: u64, level: u64) {
        if self.is_empty() {
            self.start = before;
        }
        self.allocations += 1;
        self.allocated += bytes;
        self.peak = self.peak.max(level);
        self.after = level;
    }

    /// Adds a free of `bytes` bytes. `before` and `level`: allocated bytes before and after it.
    #[inline]
    pub fn free(&mut self, bytes: u64, before: u64, level: u64) {
        if self.is_empty() {
            self.start = before;
        }
        self.frees += 1;
        self.freed += bytes;
        // A phase that only frees has its peak at its beginning.
        self.peak = self.peak.max(before);
        self.after = level;
    }

    /// Adds a row of the same phase that follows this one.
    pub fn absorb(&mut self, other: &PhaseRow) {
        if other.is_empty() {
            return;
        }
        if self.is_empty() {
            (self.start, self.first) = (other.start, other.first);
        }
        self.turns += other.turns;
        self.ended = self.ended.max(other.ended);
        self.allocations += other.allocations;
        self.allocated += other.allocated;
        self.frees += other.frees;
        self.freed += other.freed;
        self.peak = self.peak.max(other.peak);
        self.after = other.after;
        self.steps += other.steps;
    }

    /// Whether the levels differ by what the phase changed: no other phase changed anything in between.
    fn adds_up(&self) -> bool {
        self.after as i64 - self.start as i64 == self.net()
    }

    /// Whether the two phases take turns.
    fn overlaps(&self, other: &PhaseRow) -> bool {
        self.first <= other.ended && other.first <= self.ended
    }

    /// This row and one of another phase of the step as one.
    fn joined(&self, other: &PhaseRow) -> PhaseRow {
        let (mut joined, later) = if self.ended <= other.ended { (*self, other) } else { (*other, self) };
        let (start, first) =
            if self.first <= other.first { (self.start, self.first) } else { (other.start, other.first) };
        let turns = self.turns.max(other.turns);
        joined.absorb(later);
        PhaseRow { start, first, turns, steps: 1, ..joined }
    }
}

/// The order of phases in a step, or in many.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Order {
    phases: [Phase; Phase::ALL.len()],
    count: usize,
}

impl Order {
    fn of(rows: &[PhaseRow]) -> Order {
        let mut order = Order { phases: Phase::ALL, count: Phase::ALL.len() };
        order.phases.sort_by_key(|phase| rows[*phase as usize].began);
        let mut present = Order::default();
        for phase in order.phases.into_iter().filter(|phase| !rows[*phase as usize].is_empty()) {
            present.insert(present.count, phase);
        }
        present
    }

    fn all(&self) -> &[Phase] {
        &self.phases[..self.count]
    }

    fn insert(&mut self, at: usize, phase: Phase) {
        self.phases.copy_within(at..self.count, at + 1);
        self.phases[at] = phase;
        self.count += 1;
    }

    /// Inserts the phases that are only in `other`, each behind the phase that it follows there.
    fn merge(&mut self, other: &Order) {
        let mut at = 0;
        for phase in other.all() {
            match self.all().iter().position(|one| one == phase) {
                Some(index) => at = index + 1,
                None => {
                    self.insert(at, *phase);
                    at += 1;
                }
            }
        }
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
    /// The number of micro-batches, over all steps.
    pub micro_batches: u64,
    /// Gradients that are cleared before the first pass of the step. The rows of [`Self::phases`] do not count them.
    cleared: PhaseRow,
    order: Order,
}

/// A part of a step: one phase, or phases that take turns. The levels differ by the sum of the changes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct JoinedPhases {
    /// The phases in the order of the step.
    pub phases: Vec<Phase>,
    /// Their rows as one.
    pub row: PhaseRow,
    /// By category, in the order of the categories. Empty if nothing changed, or if it is unknown what.
    pub changes: Vec<(Category, Change)>,
}

impl StepRows {
    /// The highest number of allocated bytes in the step.
    pub fn peak(&self) -> u64 {
        self.phases.iter().map(|p| p.peak).max().unwrap_or(0).max(self.cleared.peak)
    }

    /// The phases that allocated or freed something, in the order in which they occur in a step.
    pub fn in_order(&self) -> impl Iterator<Item = (Phase, &PhaseRow)> {
        self.order.all().iter().map(|&phase| (phase, &self.phases[phase as usize]))
    }

    /// These phases of the step as one. `None` if they allocated and freed nothing.
    pub fn joined(&self, phases: &[Phase]) -> Option<PhaseRow> {
        let mut rows: Vec<PhaseRow> = phases.iter().map(|phase| self.phases[*phase as usize]).collect();
        rows.retain(|row| !row.is_empty());
        let start = rows.iter().min_by_key(|row| row.began)?.start;
        rows.sort_by_key(|row| row.ended);
        let mut joined = PhaseRow::default();
        rows.iter().for_each(|row| joined.absorb(row));
        Some(PhaseRow { start, steps: 1, ..joined })
    }

    /// The phases that allocated something, as a set.
    fn allocating(&self) -> u32 {
        let of = |(at, row): (usize, &PhaseRow)| u32::from(row.allocations > 0) << at;
        self.phases.iter().enumerate().map(of).sum()
    }

    /// The rows of a step, with the gradients that it clears in the optimizer's row.
    pub fn with_cleared(&self) -> StepRows {
        let mut all = StepRows { step: self.step, ticks: self.ticks, ..StepRows::default() };
        all.absorb(self);
        all
    }

    /// The parts of the step in time order, each with the indices of its rows.
    fn parts(&self) -> Vec<(Vec<usize>, JoinedPhases)> {
        let part = |index: usize, phase: Phase, row: &PhaseRow| {
            (vec![index], JoinedPhases { phases: vec![phase], row: *row, changes: Vec::new() })
        };
        let mut parts: Vec<_> = self.in_order().map(|(phase, row)| part(phase as usize, phase, row)).collect();
        if !self.cleared.is_empty() {
            let at = parts.iter().position(|(_, part)| part.row.began > self.cleared.first).unwrap_or(parts.len());
            parts.insert(at, part(CLEARED, Phase::Optimizer, &self.cleared));
        }
        let take_turns = |one: &PhaseRow, other: &PhaseRow| one.overlaps(other) && !(one.adds_up() && other.adds_up());
        let pairs = |count: usize| (0..count).flat_map(move |one| (one + 1..count).map(move |other| (one, other)));
        while let Some((one, other)) =
            pairs(parts.len()).find(|(one, other)| take_turns(&parts[*one].1.row, &parts[*other].1.row))
        {
            let (indices, removed) = parts.remove(other);
            let (all, part) = &mut parts[one];
            all.extend(indices);
            part.phases.extend(removed.phases);
            part.row = part.row.joined(&removed.row);
        }
        parts
    }

    fn absorb(&mut self, other: &StepRows) {
        self.phases[Phase::Optimizer as usize].absorb(&other.cleared);
        for (sum, row) in self.phases.iter_mut().zip(&other.phases) {
            sum.absorb(row);
        }
        self.order.merge(&other.order);
        self.micro_batches += other.micro_batches;
    }
}

/// An even sample of the steps: all of them, or every second, fourth, eighth...
#[derive(Clone, Debug, Default)]
struct Sample {
    steps: Vec<StepRows>,
    /// The number of halvings.
    halvings: u32,
    seen: u32,
}

impl Sample {
    fn add(&mut self, rows: &StepRows) {
        if self.is_due() && self.steps.len() == SAMPLED_STEPS {
            let mut at = 0;
            self.steps.retain(|_| {
                at += 1;
                at % 2 == 1
            });
            self.halvings += 1;
        }
        if self.is_due() {
            self.steps.push(*rows);
        }
        self.seen += 1;
    }

    /// Whether the next step belongs to the sample.
    fn is_due(&self) -> bool {
        self.seen.trailing_zeros() >= self.halvings
    }

    /// The step with the median peak among the steps that have the most common phases. Of equal steps, the first.
    fn typical(&self, except: Option<u32>) -> Option<&StepRows> {
        let steps = || self.steps.iter().filter(|rows| rows.step != except);
        let count = |phases: u32| steps().filter(|rows| rows.allocating() == phases).count();
        let common = steps().map(StepRows::allocating).rev().max_by_key(|phases| count(*phases))?;
        let mut like: Vec<&StepRows> = steps().filter(|rows| rows.allocating() == common).collect();
        like.sort_by_key(|rows| rows.peak());
        let median = like.get((like.len() - 1) / 2)?.peak();
        steps().find(|rows| rows.allocating() == common && rows.peak() == median)
    }
}

/// The phases of all steps of a device.
#[derive(Clone, Debug, Default)]
pub struct PhaseTable {
    before: StepRows,
    first: Vec<StepRows>,
    last: VecDeque<StepRows>,
    highest: Option<StepRows>,
    sample: Sample,
    later: StepRows,
    total: StepRows,
    steps: u32,
    /// The number of steps before the first event, which the recording has dropped.
    dropped_steps: u32,
    freed_at_exit: u64,
    changes: StepChanges,
}

impl PhaseTable {
    /// Bytes of the teardown: the frees after the last allocation that only their position ties to a phase.
    pub fn freed_at_exit(&self) -> u64 {
        self.freed_at_exit
    }

    /// The number of steps.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// The rows before the first step.
    pub fn before(&self) -> &StepRows {
        &self.before
    }

    /// The first step.
    pub fn first(&self) -> Option<&StepRows> {
        self.first.first()
    }

    /// The sum of the steps after the first, and their number. Peaks are maxima; levels are those of the last step.
    pub fn later(&self) -> (&StepRows, u32) {
        (&self.later, self.steps.saturating_sub(self.dropped_steps.max(1)))
    }

    /// A step after the first that stands for most: it has the phases that most of these steps have, and the median of
    /// their peaks. A long run is represented by an even sample of its steps. `except` is the step that an error
    /// interrupted.
    pub fn typical(&self, except: Option<u32>) -> Option<&StepRows> {
        self.sample.typical(except)
    }

    /// The parts of a step in time order.
    pub fn joined_phases(&self, rows: &StepRows) -> Vec<JoinedPhases> {
        let with_changes = |(indices, part): (Vec<usize>, JoinedPhases)| {
            let mut changes = rows.step.map_or(Vec::new(), |step| self.changes.of(step, &indices));
            if changes.iter().map(|(_, change)| change.bytes).sum::<i64>() != part.row.net() {
                changes.clear();
            }
            JoinedPhases { changes, ..part }
        };
        rows.parts().into_iter().map(with_changes).collect()
    }

    /// Forgets the changes of steps without rows, if there are many.
    fn forget_changes(&mut self) {
        if self.changes.len() < CHANGED_STEPS {
            return;
        }
        let rows = self.first.iter().chain(&self.last).chain(&self.highest).chain(&self.sample.steps);
        let kept: std::collections::HashSet<u32> = rows.filter_map(|rows| rows.step).collect();
        self.changes.retain(|step| kept.contains(&step));
    }

    /// Whether the recording has a backward pass.
    pub fn has_backward(&self) -> bool {
        self.total.phases[Phase::Backward as usize].allocations > 0
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

    fn add(&mut self, rows: StepRows) {
        self.total.absorb(&rows);
        let Some(step) = rows.step else {
            self.before.absorb(&rows);
            return;
        };
        self.steps = self.steps.max(step + 1);
        if step > 0 {
            self.later.absorb(&rows);
            self.sample.add(&rows);
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
        self.forget_changes();
    }

    /// Adds work after the last step, in which nothing was computed.
    fn add_rest(&mut self, rows: &StepRows) {
        let mut rest = PhaseRow::default();
        for row in &rows.phases {
            rest.absorb(row);
        }
        let last = self.last.back_mut().or(self.first.last_mut());
        let is_new = last.as_ref().is_none_or(|last| last.phases[Phase::Other as usize].is_empty());
        rest.steps = u32::from(is_new);
        let later = (self.steps > 1).then_some(&mut self.later);
        for sum in [last, later, Some(&mut self.total)].into_iter().flatten() {
            let is_listed = sum.order.all().contains(&Phase::Other);
            if !is_listed && !rest.is_empty() {
                sum.order.insert(sum.order.count, Phase::Other);
            }
            sum.phases[Phase::Other as usize].absorb(&rest);
        }
    }
}

/// Builds a [`PhaseTable`] while a recording streams. Events must come in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct PhaseTableBuilder {
    table: PhaseTable,
    current: StepRows,
    /// The number of events so far.
    events: u64,
    level: u64,
    /// The phase of the last event of the current step.
    last: Option<Phase>,
    pending_frees: [PhaseRow; Phase::ALL.len()],
    pending_changes: Vec<(Phase, Category, Change)>,
    has_pending_frees: bool,
}

impl From<PhaseTableBuilder> for PhaseTable {
    fn from(builder: PhaseTableBuilder) -> PhaseTable {
        builder.table
    }
}

impl Pass for PhaseTableBuilder {
    fn started(start: &RecordingStart<'_>) -> PhaseTableBuilder {
        let table = PhaseTable { dropped_steps: start.dropped_steps, ..PhaseTable::default() };
        PhaseTableBuilder { table, ..PhaseTableBuilder::default() }
    }

    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let BlockAllocated { e, block, classification, now, .. } = *allocated;
        let level = allocated.usage.allocated;
        if allocated.is_earlier {
            self.level = level;
        } else {
            self.alloc(now.step, classification.phase, e.ticks, block.memory.size, level);
            self.micro_batches(allocated.micro_batches);
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        let (phase, size, level) = (freed.classification.phase, freed.block.memory.size, freed.usage.allocated);
        if freed.may_be_teardown {
            self.free_maybe_teardown(phase, size, level);
        } else {
            self.free(freed.now.step, phase, freed.e.ticks, size, level);
        }
    }

    #[inline]
    fn lifetime_ended(&mut self, ended: &LifetimeEnded<'_>) {
        let (block, category) = (ended.block, ended.classification.category);
        let change = Change::of(block);
        if let Some(step) = block.position.step {
            self.table.changes.add(step, block.phase as usize, category, change);
        }
        let Some(freed) = ended.freed else { return };
        let phase = freed.classification.phase;
        if freed.may_be_teardown {
            self.pending_changes.push((phase, category, change.negated()));
        } else if let Some(step) = self.current.step {
            self.table.changes.add(step, phase as usize, category, change.negated());
        }
    }

    fn finish(&mut self, end: &RecordingEnd<'_>) {
        self.close();
        // A step can allocate nothing.
        self.table.steps = self.table.steps.max(end.ended_steps);
    }
}

impl PhaseTableBuilder {
    /// `level` has the allocated bytes after the allocation.
    #[inline]
    fn alloc(&mut self, step: Option<u32>, phase: Phase, ticks: u64, bytes: u64, level: u64) {
        self.settle_pending_frees();
        let before = self.level;
        let (row, number) = self.row(step, phase, ticks);
        if row.allocations == 0 {
            row.began = number;
        }
        row.ended = number;
        row.alloc(bytes, before, level);
        self.level = level;
    }

    /// `level` has the allocated bytes after the free.
    #[inline]
    fn free(&mut self, step: Option<u32>, phase: Phase, ticks: u64, bytes: u64, level: u64) {
        let before = self.level;
        let (row, number) = self.row(step, phase, ticks);
        if row.is_empty() {
            row.began = number;
        }
        row.ended = number;
        row.free(bytes, before, level);
        self.level = level;
    }

    /// A free that only its position ties to `phase`. It is held back until the next allocation.
    fn free_maybe_teardown(&mut self, phase: Phase, bytes: u64, level: u64) {
        self.has_pending_frees = true;
        self.pending_frees[phase as usize].free(bytes, self.level, level);
        self.level = level;
    }

    /// States that the current step has had `count` micro-batches.
    #[inline]
    fn micro_batches(&mut self, count: u32) {
        self.current.micro_batches = self.current.micro_batches.max(count.into());
    }

    #[inline]
    fn settle_pending_frees(&mut self) {
        if std::mem::take(&mut self.has_pending_frees) {
            self.commit_pending_frees();
        }
    }

    fn commit_pending_frees(&mut self) {
        for (row, pending) in self.current.phases.iter_mut().zip(&mut self.pending_frees) {
            if row.is_empty() {
                (row.began, row.first) = (self.events, self.events);
            }
            if !pending.is_empty() {
                row.ended = self.events;
            }
            let first = row.first;
            row.absorb(&std::mem::take(pending));
            row.first = first;
        }
        for (phase, category, change) in self.pending_changes.drain(..) {
            if let Some(step) = self.current.step {
                self.table.changes.add(step, phase as usize, category, change);
            }
        }
    }

    #[inline]
    fn row(&mut self, step: Option<u32>, phase: Phase, ticks: u64) -> (&mut PhaseRow, u64) {
        if step != self.current.step {
            self.close_step();
            self.current = StepRows { step, ticks: (ticks, ticks), ..StepRows::default() };
        }
        self.current.ticks.1 = ticks;
        self.events += 1;
        if self.last != Some(phase) {
            self.turn(phase);
        }
        (&mut self.current.phases[phase as usize], self.events)
    }

    /// Another phase than that of the last event changes something.
    fn turn(&mut self, phase: Phase) {
        self.last = Some(phase);
        let rows = &mut self.current;
        let backward = rows.phases[Phase::Backward as usize];
        let row = &mut rows.phases[phase as usize];
        let only_frees = row.frees > 0 && row.allocations == 0;
        let precedes_backward = backward.is_empty() || row.ended < backward.first;
        if phase == Phase::Optimizer && only_frees && precedes_backward && rows.cleared.is_empty() {
            // Nothing that this phase allocates in the step precedes its second turn.
            rows.cleared = std::mem::take(row);
            if let Some(step) = rows.step {
                self.table.changes.move_row(step, phase as usize, CLEARED);
            }
        }
        if row.is_empty() {
            row.first = self.events;
        }
        row.turns += 1;
    }

    fn close_step(&mut self) {
        self.last = None;
        let mut rows = std::mem::take(&mut self.current);
        rows.order = Order::of(&rows.phases);
        for row in rows.phases.iter_mut().filter(|row| !row.is_empty()) {
            row.steps = 1;
        }
        self.table.add(rows);
    }

    /// Ends the recording. If nothing was computed after the last step (only a barrier or a report ran), that work
    /// began no step. It counts as phase "other" of the last step.
    fn close(&mut self) {
        let mut computing = Phase::ALL.iter().filter(|phase| phase.computes());
        let computed = computing.any(|phase| !self.current.phases[*phase as usize].is_empty());
        if computed || self.current.step.is_none_or(|step| step == 0) {
            self.close_step();
        } else {
            self.table.add_rest(&std::mem::take(&mut self.current));
        }
        self.table.freed_at_exit = self.pending_frees.iter().map(|row| row.freed).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_add_up() {
        let mut table = PhaseTableBuilder::default();
        table.alloc(None, Phase::Load, 1, 100, 100);
        for step in 0..100 {
            let extra = if step == 50 { 1000 } else { 0 };
            table.alloc(Some(step), Phase::Forward, 2, 50 + extra, 150 + extra);
            table.free(Some(step), Phase::Backward, 3, 50 + extra, 100);
        }
        table.close();
        let table = table.table;
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

    /// The names of the phases, in order.
    fn names(rows: &StepRows) -> String {
        rows.in_order().map(|(phase, _)| phase.name()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn phases_are_listed_in_the_order_of_the_step() {
        let mut table = PhaseTableBuilder::default();
        table.alloc(Some(0), Phase::Forward, 0, 9, 9);
        table.alloc(Some(0), Phase::Eval, 0, 1, 10);
        for (step, phases) in [
            (1, vec![Phase::Data, Phase::Forward, Phase::Backward, Phase::Optimizer]),
            (2, vec![Phase::Data, Phase::Eval, Phase::Forward, Phase::Backward, Phase::Optimizer, Phase::Other]),
            (3, vec![Phase::Load, Phase::Forward]),
        ] {
            // Gradients are cleared before the forward pass.
            table.free(Some(step), Phase::Optimizer, 0, 1, 9);
            phases.iter().for_each(|phase| table.alloc(Some(step), *phase, 0, 1, 10));
        }
        table.free(Some(4), Phase::Optimizer, 0, 1, 9);
        table.alloc(Some(4), Phase::Forward, 0, 1, 10);
        table.close();
        let table = table.table;
        assert_eq!(names(table.first().unwrap()), "forward eval");
        let kept = table.kept();
        assert_eq!(names(kept[1]), "data forward backward optimizer");
        assert_eq!(names(kept[4]), "optimizer forward", "a phase that only frees");
        let (later, count) = table.later();
        assert_eq!(names(later), "data eval forward backward optimizer load other");
        let steps = |phase: Phase| later.phases[phase as usize].steps;
        assert_eq!((count, steps(Phase::Forward), steps(Phase::Eval), steps(Phase::Data)), (4, 4, 1, 2));
    }

    #[test]
    fn the_typical_step_is_one_of_the_common_kind() {
        let mut table = PhaseTableBuilder::default();
        for step in 0..1000 {
            let extra = u64::from(step) % 5;
            if step % 10 == 9 {
                table.alloc(Some(step), Phase::Eval, 2, 500, 500);
                table.free(Some(step), Phase::Eval, 2, 500, 0);
            }
            table.alloc(Some(step), Phase::Forward, 2, 50 + extra, 50 + extra);
            table.alloc(Some(step), Phase::Backward, 3, 10, 60 + extra);
            table.free(Some(step), Phase::Backward, 3, 60 + extra, 0);
        }
        table.close();
        let table = table.table;
        assert!(table.sample.steps.len() > SAMPLED_STEPS / 2 && table.sample.steps.len() <= SAMPLED_STEPS);
        let typical = table.typical(None).unwrap();
        assert_eq!((typical.peak(), names(typical)), (62, "forward backward".to_owned()));
        let row = |phase: Phase| typical.phases[phase as usize];
        let levels = |row: PhaseRow| (row.start, row.peak, row.after);
        assert_eq!((levels(row(Phase::Forward)), levels(row(Phase::Backward))), ((0, 52, 52), (52, 62, 0)));
        assert_eq!(levels(typical.joined(&[Phase::Backward, Phase::Forward]).unwrap()), (0, 62, 0));
        assert_eq!(typical.joined(&[Phase::Eval]), None);
        let mut short = PhaseTableBuilder::default();
        for step in 0..3 {
            short.alloc(Some(step), Phase::Forward, 2, 50, 50);
            short.free(Some(step), Phase::Forward, 3, 50, 0);
        }
        short.close();
        let short = short.table;
        let step = |except: Option<u32>| short.typical(except).and_then(|rows| rows.step);
        assert_eq!((step(None), step(Some(1)), step(Some(2))), (Some(1), Some(2), Some(1)));
    }

    /// The parts of the last step: their phases, levels and turns.
    fn parts(table: &PhaseTable) -> Vec<(String, [u64; 3], u32)> {
        let part = |part: JoinedPhases| {
            let names: Vec<&str> = part.phases.iter().map(|phase| phase.name()).collect();
            (names.join(" "), [part.row.start, part.row.peak, part.row.after], part.row.turns)
        };
        table.joined_phases(table.kept().last().unwrap()).into_iter().map(part).collect()
    }

    #[test]
    fn phases_that_take_turns_are_one_part() {
        let mut table = PhaseTableBuilder::default();
        // An older gradient is cleared before the forward pass.
        table.alloc(Some(0), Phase::Backward, 0, 8, 8);
        table.alloc(Some(1), Phase::Data, 0, 1, 9);
        table.free(Some(1), Phase::Data, 0, 1, 8);
        table.free(Some(1), Phase::Optimizer, 0, 8, 0);
        table.alloc(Some(1), Phase::Forward, 0, 10, 10);
        for _ in 0..4 {
            table.alloc(Some(1), Phase::Recompute, 0, 5, 15);
            table.free(Some(1), Phase::Backward, 0, 5, 10);
        }
        table.alloc(Some(1), Phase::Backward, 0, 8, 18);
        table.free(Some(1), Phase::Backward, 0, 10, 8);
        // An evaluation that frees all that it allocates.
        table.alloc(Some(1), Phase::Eval, 0, 20, 28);
        table.free(Some(1), Phase::Eval, 0, 20, 8);
        table.alloc(Some(1), Phase::Optimizer, 0, 2, 10);
        table.free(Some(1), Phase::Optimizer, 0, 2, 8);
        table.close();
        let expected = [
            ("data", [8, 9, 8], 1),
            ("optimizer", [8, 8, 0], 1),
            ("forward", [0, 10, 10], 1),
            ("recompute backward", [10, 18, 8], 4),
            ("eval", [8, 28, 8], 1),
            ("optimizer", [8, 10, 8], 1),
        ];
        let expected: Vec<_> = expected.map(|(names, levels, turns)| (names.to_owned(), levels, turns)).into();
        assert_eq!(parts(&table.table), expected);
        let all = table.table.kept()[1].with_cleared().phases[Phase::Optimizer as usize];
        assert_eq!((all.freed, all.start, all.after), (10, 8, 8));
    }

    #[test]
    fn the_changes_of_a_part_add_up() {
        let mut table = PhaseTableBuilder::default();
        table.alloc(Some(0), Phase::Forward, 0, 10, 10);
        table.free(Some(0), Phase::Backward, 0, 10, 0);
        let change = Change { bytes: 10, requested: 9 };
        table.table.changes.add(0, Phase::Forward as usize, Category::Activation, change);
        table.close();
        let first = *table.table.first().unwrap();
        let parts = table.table.joined_phases(&first);
        assert_eq!(parts[0].changes, [(Category::Activation, change)]);
        assert!(parts[1].changes.is_empty(), "it is unknown what was freed");
    }

    #[test]
    fn the_first_of_equal_peaks_counts() {
        let mut table = PhaseTableBuilder::default();
        for step in 0..100 {
            table.alloc(Some(step), Phase::Forward, 2, 50, 50);
            table.free(Some(step), Phase::Backward, 3, 50, 0);
        }
        table.close();
        let table = table.table;
        assert_eq!(table.highest.unwrap().step, Some(0));
    }

    #[test]
    fn work_without_computation_after_the_last_step_is_not_a_step() {
        let mut table = PhaseTableBuilder::default();
        table.alloc(Some(0), Phase::Forward, 1, 100, 100);
        table.alloc(Some(1), Phase::Optimizer, 2, 10, 110);
        table.alloc(Some(2), Phase::Data, 3, 5, 115);
        table.close();
        let table = table.table;
        assert_eq!(table.steps(), 2);
        assert_eq!(table.later().0.phases[Phase::Other as usize].allocated, 5);
        assert_eq!(table.kept()[1].phases[Phase::Other as usize].allocated, 5);
    }

    #[test]
    fn the_teardown_does_not_count_for_the_last_step() {
        let mut table = PhaseTableBuilder::default();
        table.alloc(Some(0), Phase::Forward, 1, 100, 100);
        table.free_maybe_teardown(Phase::Other, 40, 60);
        table.alloc(Some(0), Phase::Forward, 2, 10, 70);
        table.free_maybe_teardown(Phase::Forward, 70, 0);
        table.close();
        let table = table.table;
        assert_eq!(table.first().unwrap().phases[Phase::Other as usize].freed, 40);
        assert_eq!(table.freed_at_exit(), 70);
        assert_eq!(table.first().unwrap().phases[Phase::Forward as usize].freed, 0);
    }
}
