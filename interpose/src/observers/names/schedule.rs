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
const UNCONDITIONAL_HEAP_SCANS: u64 = 8;
/// After those, the minimum number of events between two heap scans. A heap scan over 250,000 objects takes 25 ms. A
/// program needs at least 5 s for this many events.
const EVENTS_PER_HEAP_SCAN: u64 = 1 << 20;
/// Without a change, a heap scan runs after this many events. Later ones run each time the number of events has grown
/// by [`HEAP_SCAN_GROWTH`].
const FIRST_PERIODIC_HEAP_SCAN: u64 = 1 << 19;
const HEAP_SCAN_GROWTH: u64 = 8;

/// Uses the first occasions of a kind, then ever fewer: the number used grows with the logarithm of all.
#[derive(Default, Debug)]
struct Cadence {
    seen: u64,
    next: u64,
}

impl Cadence {
    /// Counts an occasion and returns whether to use it.
    fn next_is_due(&mut self) -> bool {
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
    Heap,
}

/// Inputs of the decision beside the causes.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct ScanInputs {
    /// Events recorded so far.
    pub(super) events: u64,
    /// Whether the program called a module or an optimizer that no scan has seen, or a known model no longer exists.
    pub(super) has_changed: bool,
}

/// Counts the occasions and the scans so far.
#[derive(Default, Debug)]
pub(super) struct Schedule {
    training: Cadence,
    failures: Cadence,
    /// Number of heap scans so far.
    heap_scans: u64,
    /// Whether a heap scan ran after the program had begun to train.
    has_scanned_training: bool,
    /// Number of events at the last heap scan.
    last_heap_scan: u64,
    /// Whether a change still waits for its heap scan.
    has_changed: bool,
}

impl Schedule {
    /// Counts these causes and decides. A heap scan counts only once [`Schedule::heap_scan_done`] is called.
    pub(super) fn decide(&mut self, causes: u8, inputs: ScanInputs) -> Scan {
        self.has_changed |= inputs.has_changed;
        let is_training = causes & cause::TRAINING != 0;
        let is_training_due = is_training && self.training.next_is_due();
        let is_failure_due = causes & cause::OOM != 0 && self.failures.next_is_due();
        let is_due = is_training_due || is_failure_due || causes & cause::FREES != 0;
        let is_overdue =
            inputs.events >= (self.last_heap_scan.saturating_mul(HEAP_SCAN_GROWTH)).max(FIRST_PERIODIC_HEAP_SCAN);
        let is_heap = self.heap_scans == 0
            || (is_training && !self.has_scanned_training)
            || (self.has_changed && self.may_scan_after_change(inputs.events))
            || (is_due && is_overdue);
        match (is_heap, is_due) {
            (true, _) => Scan::Heap,
            (false, true) => Scan::Known,
            (false, false) => Scan::Nothing,
        }
    }

    fn may_scan_after_change(&self, events: u64) -> bool {
        self.heap_scans < UNCONDITIONAL_HEAP_SCANS || events >= self.last_heap_scan.saturating_add(EVENTS_PER_HEAP_SCAN)
    }

    /// Reports that a heap scan has run at this number of events. `is_training` says whether the program had begun to
    /// train.
    pub(super) fn heap_scan_done(&mut self, events: u64, is_training: bool) {
        self.heap_scans += 1;
        self.last_heap_scan = events;
        self.has_scanned_training |= is_training;
        self.has_changed = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(events: u64) -> ScanInputs {
        ScanInputs { events, has_changed: false }
    }

    /// Decides, and reports a heap scan as made.
    fn step(schedule: &mut Schedule, causes: u8, inputs: ScanInputs) -> Scan {
        let scan = schedule.decide(causes, inputs);
        if scan == Scan::Heap {
            schedule.heap_scan_done(inputs.events, causes & cause::TRAINING != 0);
        }
        scan
    }

    #[test]
    fn the_first_steps_are_scanned_and_later_ones_more_and_more_rarely() {
        let mut schedule = Schedule::default();
        let scans: Vec<Scan> = (0..3000)
            .map(|n| step(&mut schedule, [cause::BACKWARD, cause::OPTIMIZER, cause::OPTIMIZER][n % 3], inputs(9)))
            .collect();
        assert_eq!(scans[0], Scan::Heap);
        assert!(scans[1..6].iter().all(|scan| *scan == Scan::Known), "{:?}", &scans[..6]);
        let known = scans.iter().filter(|scan| **scan == Scan::Known).count();
        assert!((15..30).contains(&known), "{known} scans in 1000 steps");
        assert_eq!(scans.iter().filter(|scan| **scan == Scan::Heap).count(), 1);
    }

    #[test]
    fn the_start_of_training_causes_a_heap_scan() {
        let mut schedule = Schedule::default();
        assert_eq!(step(&mut schedule, cause::FREES, inputs(20)), Scan::Heap);
        assert_eq!(step(&mut schedule, cause::FREES, inputs(160)), Scan::Known);
        assert_eq!(step(&mut schedule, cause::BACKWARD, inputs(200)), Scan::Heap);
    }

    #[test]
    fn changes_cause_heap_scans_at_once_up_to_a_limit() {
        let mut schedule = Schedule::default();
        step(&mut schedule, cause::BACKWARD, inputs(1));
        (0..100).for_each(|n| _ = step(&mut schedule, cause::BACKWARD, inputs(n)));
        let has_changed = |events| ScanInputs { events, has_changed: true };
        let made =
            (0..100_u64).filter(|n| step(&mut schedule, cause::BACKWARD, has_changed(100 + n)) == Scan::Heap).count();
        assert_eq!(made as u64, UNCONDITIONAL_HEAP_SCANS - 1);
        // The schedule remembers the change until a heap scan is allowed again.
        assert_ne!(step(&mut schedule, cause::BACKWARD, inputs(300)), Scan::Heap);
        assert_eq!(step(&mut schedule, cause::BACKWARD, inputs(300 + EVENTS_PER_HEAP_SCAN)), Scan::Heap);
    }

    #[test]
    fn a_heap_scan_follows_each_eightfold_growth_of_events() {
        let mut schedule = Schedule::default();
        let heap_scans =
            (0..4096_u64).filter(|n| step(&mut schedule, cause::FREES, inputs(n << 14)) == Scan::Heap).count();
        // Heap scans run at 0, 2^19, 2^22 and 2^25 of 2^26 events.
        assert_eq!(heap_scans, 4);
    }

    #[test]
    fn failed_allocations_are_scanned_regardless_of_training() {
        let mut schedule = Schedule::default();
        (0..1000).for_each(|n| _ = step(&mut schedule, cause::BACKWARD, inputs(n)));
        let scans: Vec<Scan> = (0..6).map(|n| step(&mut schedule, cause::OOM, inputs(1000 + n))).collect();
        assert!(scans.iter().all(|scan| *scan == Scan::Known), "{scans:?}");
    }
}
