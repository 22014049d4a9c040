//! Decides when the program's objects are scanned for names.
//!
//! The decision depends only on what the program has done: backward passes, optimizer steps, freed blocks and failed
//! allocations. It never reads a clock, so the same program gets the same scans and the same names on an idle and on a
//! busy machine. The number of scans grows with the logarithm of the program's work, which keeps their cost low.

/// Reasons for a scan, as bits of a set.
pub(super) mod cause {
    /// A backward pass has ended, so the gradients exist.
    pub(crate) const BACKWARD: u8 = 1;
    /// An optimizer step begins or has ended, so the optimizer state exists.
    pub(crate) const OPTIMIZER: u8 = 2;
    /// The program has freed enough blocks for a scan without a backward pass.
    pub(crate) const FREES: u8 = 4;
    /// An allocation failed. It may be the last event of the program.
    pub(crate) const OOM: u8 = 8;
    /// Causes that only a training program produces.
    pub(crate) const TRAINING: u8 = BACKWARD | OPTIMIZER;
}

/// The first occasions, all of which are used: the ends of two backward passes and both ends of two optimizer steps.
const FIRST_OCCASIONS: u64 = 6;
/// How many heap scans changes in the program may cause regardless of their cost.
const FREE_FULL_SCANS: u64 = 8;
/// After those, the minimum number of events between two heap scans. A heap scan over 250,000 objects takes 25 ms. A
/// program needs at least 5 s for this many events.
const EVENTS_PER_FULL_SCAN: u64 = 1 << 20;
/// Without a change, a heap scan runs after this many events. Later ones run each time the number of events has grown
/// by [`FULL_GROWTH`].
const FIRST_FULL_EVENTS: u64 = 1 << 19;
const FULL_GROWTH: u64 = 8;

/// Uses the first occasions of a kind, then ever fewer: the number used grows with the logarithm of all.
#[derive(Default, Debug)]
struct Cadence {
    seen: u64,
    next: u64,
}

impl Cadence {
    /// Counts an occasion and returns whether to use it.
    fn takes(&mut self) -> bool {
        let number = self.seen;
        self.seen += 1;
        let is_due = number >= self.next;
        if is_due {
            self.next = number + if number < FIRST_OCCASIONS { 1 } else { number / 2 };
        }
        is_due
    }
}

/// The extent of a scan.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Scan {
    Nothing,
    /// The known models and optimizers.
    Known,
    /// All objects of the program.
    All,
}

/// Inputs of the decision beside the causes.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Facts {
    /// Events recorded so far.
    pub(super) events: u64,
    /// Whether the program called a module or an optimizer that no scan has seen, or a known model no longer exists.
    pub(super) changed: bool,
}

/// Counts the occasions and the scans so far.
#[derive(Default, Debug)]
pub(super) struct Schedule {
    training: Cadence,
    failures: Cadence,
    /// Number of heap scans so far.
    full_scans: u64,
    /// Whether a heap scan ran after the program had begun to train.
    seen_training: bool,
    /// Number of events at the last heap scan.
    full_at: u64,
    /// Whether a change still waits for its heap scan.
    changed: bool,
}

impl Schedule {
    /// Counts these causes and decides. A heap scan counts only once [`Schedule::made_full`] is called.
    pub(super) fn decide(&mut self, causes: u8, facts: Facts) -> Scan {
        self.changed |= facts.changed;
        let trains = causes & cause::TRAINING != 0;
        let is_training_due = trains && self.training.takes();
        let is_failure_due = causes & cause::OOM != 0 && self.failures.takes();
        let is_due = is_training_due || is_failure_due || causes & cause::FREES != 0;
        let is_overdue = facts.events >= (self.full_at.saturating_mul(FULL_GROWTH)).max(FIRST_FULL_EVENTS);
        let all = self.full_scans == 0
            || (trains && !self.seen_training)
            || (self.changed && self.may_follow_change(facts.events))
            || (is_due && is_overdue);
        match (all, is_due) {
            (true, _) => Scan::All,
            (false, true) => Scan::Known,
            (false, false) => Scan::Nothing,
        }
    }

    fn may_follow_change(&self, events: u64) -> bool {
        self.full_scans < FREE_FULL_SCANS || events >= self.full_at.saturating_add(EVENTS_PER_FULL_SCAN)
    }

    /// Reports that a heap scan has run at this number of events. `trains` says whether the program had begun to train.
    pub(super) fn made_full(&mut self, events: u64, trains: bool) {
        self.full_scans += 1;
        self.full_at = events;
        self.seen_training |= trains;
        self.changed = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(events: u64) -> Facts {
        Facts { events, changed: false }
    }

    /// Decides, and reports a heap scan as made.
    fn step(schedule: &mut Schedule, causes: u8, facts: Facts) -> Scan {
        let scan = schedule.decide(causes, facts);
        if scan == Scan::All {
            schedule.made_full(facts.events, causes & cause::TRAINING != 0);
        }
        scan
    }

    #[test]
    fn the_first_steps_are_scanned_and_later_ones_ever_more_rarely() {
        let mut schedule = Schedule::default();
        let scans: Vec<Scan> = (0..3000)
            .map(|n| step(&mut schedule, [cause::BACKWARD, cause::OPTIMIZER, cause::OPTIMIZER][n % 3], facts(9)))
            .collect();
        assert_eq!(scans[0], Scan::All);
        assert!(scans[1..6].iter().all(|scan| *scan == Scan::Known), "{:?}", &scans[..6]);
        let known = scans.iter().filter(|scan| **scan == Scan::Known).count();
        assert!((15..30).contains(&known), "{known} scans in 1000 steps");
        assert_eq!(scans.iter().filter(|scan| **scan == Scan::All).count(), 1);
    }

    #[test]
    fn a_program_that_begins_to_train_is_scanned_anew() {
        let mut schedule = Schedule::default();
        assert_eq!(step(&mut schedule, cause::FREES, facts(20)), Scan::All);
        assert_eq!(step(&mut schedule, cause::FREES, facts(160)), Scan::Known);
        assert_eq!(step(&mut schedule, cause::BACKWARD, facts(200)), Scan::All);
    }

    #[test]
    fn changes_are_scanned_at_once_until_there_are_too_many() {
        let mut schedule = Schedule::default();
        step(&mut schedule, cause::BACKWARD, facts(1));
        (0..100).for_each(|n| _ = step(&mut schedule, cause::BACKWARD, facts(n)));
        let changed = |events| Facts { events, changed: true };
        let made = (0..100_u64).filter(|n| step(&mut schedule, cause::BACKWARD, changed(100 + n)) == Scan::All).count();
        assert_eq!(made as u64, FREE_FULL_SCANS - 1);
        // The schedule remembers the change until a heap scan is allowed again.
        assert_ne!(step(&mut schedule, cause::BACKWARD, facts(300)), Scan::All);
        assert_eq!(step(&mut schedule, cause::BACKWARD, facts(300 + EVENTS_PER_FULL_SCAN)), Scan::All);
    }

    #[test]
    fn all_objects_are_scanned_again_as_events_grow_eightfold() {
        let mut schedule = Schedule::default();
        let full = (0..4096_u64).filter(|n| step(&mut schedule, cause::FREES, facts(n << 14)) == Scan::All).count();
        // Heap scans run at 0, 2^19, 2^22 and 2^25 of 2^26 events.
        assert_eq!(full, 4);
    }

    #[test]
    fn failures_are_scanned_whatever_training_has_used_up() {
        let mut schedule = Schedule::default();
        (0..1000).for_each(|n| _ = step(&mut schedule, cause::BACKWARD, facts(n)));
        let scans: Vec<Scan> = (0..6).map(|n| step(&mut schedule, cause::OOM, facts(1000 + n))).collect();
        assert!(scans.iter().all(|scan| *scan == Scan::Known), "{scans:?}");
    }
}
