//! When the program's objects are scanned for names.
//!
//! Decided by what the program has done (backward passes, optimizer steps, freed blocks, failed allocations), never by a clock: the same
//! program is scanned at the same places on an idle and on a busy machine, and gets the same names. Scans stay cheap because their number
//! grows with the logarithm of what the program does.

/// Why a scan is requested; bits of a set.
pub(super) mod cause {
    /// A backward pass has ended: the gradients are there.
    pub(crate) const BACKWARD: u8 = 1;
    /// An optimizer's step begins or has ended: what it keeps is there.
    pub(crate) const OPTIMIZER: u8 = 2;
    /// The program has freed so many blocks that a program without backward passes is scanned.
    pub(crate) const FREES: u8 = 4;
    /// An allocation failed: it may be the last that is seen of the program.
    pub(crate) const OOM: u8 = 8;
    /// What only a program that trains does.
    pub(crate) const TRAINING: u8 = BACKWARD | OPTIMIZER;
}

/// Occasions that are all taken: the ends of two backward passes and both ends of two optimizer steps.
const FIRST_OCCASIONS: u64 = 6;
/// Scans of all objects that a change in the program may cause whatever they cost.
const FREE_FULL_SCANS: u64 = 8;
/// Events from one such scan to the next after that. A scan of all objects takes 25 ms where there are 250,000; so many events take a
/// program 5 s and more.
const EVENTS_PER_FULL_SCAN: u64 = 1 << 20;
/// Without any change, all objects are scanned again after so many events, and then each time that their number has grown by
/// [`FULL_GROWTH`].
const FIRST_FULL_EVENTS: u64 = 1 << 19;
const FULL_GROWTH: u64 = 8;

/// Takes the first occasions of a kind, and then one in ever more: the number taken grows with the logarithm of all.
#[derive(Default, Debug)]
struct Cadence {
    seen: u64,
    next: u64,
}

impl Cadence {
    /// Counts an occasion; whether it is taken.
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

/// What to scan now.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Scan {
    Nothing,
    /// The models and optimizers that are known.
    Known,
    /// All objects of the program.
    All,
}

/// What the decision rests on, beside its causes.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Facts {
    /// Events recorded so far.
    pub(super) events: u64,
    /// A module or an optimizer was called that no scan has seen, or a known model is gone.
    pub(super) changed: bool,
}

/// The state of the decision.
#[derive(Default, Debug)]
pub(super) struct Schedule {
    training: Cadence,
    failures: Cadence,
    /// Scans of all objects so far, and whether one came after the program was first seen to train.
    full_scans: u64,
    seen_training: bool,
    /// Events at the last scan of all objects.
    full_at: u64,
    /// A change that waits for its scan.
    changed: bool,
}

impl Schedule {
    /// Counts these causes and decides. The scan of all objects counts as made when [`Schedule::made_full`] is called.
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

    /// All objects have been scanned; `trains`: the program had been seen to train.
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

    /// Decides, and makes what was decided.
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
        // The change is remembered until its time comes.
        assert_ne!(step(&mut schedule, cause::BACKWARD, facts(300)), Scan::All);
        assert_eq!(step(&mut schedule, cause::BACKWARD, facts(300 + EVENTS_PER_FULL_SCAN)), Scan::All);
    }

    #[test]
    fn all_objects_are_scanned_again_as_events_grow_eightfold() {
        let mut schedule = Schedule::default();
        let full = (0..4096_u64).filter(|n| step(&mut schedule, cause::FREES, facts(n << 14)) == Scan::All).count();
        // At 0, 2^19, 2^22 and 2^25 events of 2^26.
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
