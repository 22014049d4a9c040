//! Watches the events on their way into the ring, for features that want to know of some.
//!
//! This is on the event path. It counts freed blocks, looks up freed addresses in a bitmap and tests two flags. A
//! feature is called only if a threshold is reached or a requested event comes.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};

use memtrace_trace::event::{Action, Event, Flags, Source};

/// Number of hash slots for addresses.
const ADDRESS_SLOTS: usize = 1 << 15;

/// Why an event is reported to features.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    /// The next event in a backward pass has come ([`Watch::report_backward`]).
    Backward,
    /// As many blocks are freed as requested ([`Watch::report_at_frees`]).
    Frees,
    /// As many blocks are freed as the reader of an engine's counters requested ([`Watch::read_counters_at_frees`]).
    Counters,
    /// An allocation has failed.
    OutOfMemory,
}

/// Counters, thresholds and watched addresses of one recording.
pub(crate) struct Watch {
    /// Set if the next event in a backward pass is to be reported.
    reports_backward: AtomicBool,
    /// Blocks freed so far. Not exact, because threads increment it without synchronization.
    frees: AtomicU32,
    /// The value of `frees` that is to be reported next.
    report_at: AtomicU32,
    /// The values that are requested for [`Cause::Frees`] and [`Cause::Counters`]; 0 for none.
    requested: [AtomicU32; 2],
    /// One bit for each hash slot of addresses. A set bit means that memory in this slot is watched and no block in it
    /// was freed since. The bitmap is small, so that a free finds its word in the processor's L1 cache. Empty unless a
    /// feature watches frees.
    watched_slots: Box<[AtomicU64]>,
    /// For each hash slot, how often a free has cleared its bit.
    free_counts: Box<[AtomicU16]>,
}

fn slot(address: u64) -> usize {
    ((address >> 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 49) as usize % ADDRESS_SLOTS
}

impl Watch {
    /// Watches nothing and takes no memory.
    pub(crate) fn new() -> Watch {
        Watch {
            reports_backward: AtomicBool::new(false),
            frees: AtomicU32::new(0),
            report_at: AtomicU32::new(0),
            requested: [const { AtomicU32::new(0) }; 2],
            watched_slots: Box::default(),
            free_counts: Box::default(),
        }
    }

    /// Counts and watches freed blocks from now on.
    pub(crate) fn watch_frees(&mut self) {
        self.watched_slots = (0..ADDRESS_SLOTS / 64).map(|_| AtomicU64::new(0)).collect();
        self.free_counts = (0..ADDRESS_SLOTS).map(|_| AtomicU16::new(0)).collect();
    }

    /// Notes an event that is about to be written. Calls `report` if features requested a report of it, and passes on
    /// whether as many blocks are freed as requested. [`Self::causes`] has the reasons.
    #[inline(always)]
    pub(crate) fn note(&self, event: &Event, report: impl FnOnce(bool)) {
        let is_free = match event.action {
            Action::FreeRequested => true,
            // The CPU allocator has no separate free request and does not defer frees.
            Action::FreeCompleted => event.source == Source::TorchCpu,
            Action::Oom => return report(false),
            _ => false,
        };
        let at_threshold = is_free && self.block_freed(event.addr);
        if at_threshold || self.is_reported_backward(event) {
            report(at_threshold);
        }
    }

    /// Why an event is reported. `at_threshold` comes from [`Self::note`].
    pub(crate) fn causes(&self, event: &Event, at_threshold: bool) -> impl Iterator<Item = Cause> {
        let [frees, counters] = if at_threshold { self.reached() } else { [false; 2] };
        let causes = [
            (frees, Cause::Frees),
            (counters, Cause::Counters),
            (self.is_reported_backward(event), Cause::Backward),
            (matches!(event.action, Action::Oom), Cause::OutOfMemory),
        ];
        causes.into_iter().filter_map(|(is_cause, cause)| is_cause.then_some(cause))
    }

    #[inline(always)]
    fn is_reported_backward(&self, event: &Event) -> bool {
        event.flags.contains(Flags::IN_BACKWARD) && self.reports_backward.load(Ordering::Relaxed)
    }

    /// Returns whether as many blocks are freed as requested.
    #[inline(always)]
    fn block_freed(&self, address: u64) -> bool {
        let slot = slot(address);
        let Some(watched_slots) = self.watched_slots.get(slot / 64) else { return false };
        // Relaxed: a free that happens after the question (`free_count_at`) sees the bit, because later reads of one
        // word see the same or a later value. The question was asked with the GIL held, and the object that it was
        // about can only be freed by somebody who had the GIL, or a lock of the allocator, afterwards. A free at the
        // same time as the question is one that it need not see: the object is looked at after the bit was set.
        if watched_slots.load(Ordering::Relaxed) >> (slot % 64) & 1 != 0 {
            self.mark_freed(slot);
        }
        // Two threads that free at the same time may lose an increment. Only the time of a report depends on this
        // counter.
        let frees = self.frees.load(Ordering::Relaxed).wrapping_add(1);
        self.frees.store(frees, Ordering::Relaxed);
        frees == self.report_at.load(Ordering::Relaxed)
    }

    /// Counts a free of memory in this hash slot.
    #[cold]
    fn mark_freed(&self, slot: usize) {
        let Some((watched_slots, number)) = self.watched_slots.get(slot / 64).zip(self.free_counts.get(slot)) else {
            return;
        };
        watched_slots.fetch_and(!(1 << (slot % 64)), Ordering::SeqCst);
        number.fetch_add(1, Ordering::SeqCst);
    }

    /// A number that does not change while no block at this address is freed. The address is watched from now on.
    pub(crate) fn free_count_at(&self, address: u64) -> u16 {
        let slot = slot(address);
        let Some((watched_slots, number)) = self.watched_slots.get(slot / 64).zip(self.free_counts.get(slot)) else {
            return 0;
        };
        let bit = 1 << (slot % 64);
        loop {
            watched_slots.fetch_or(bit, Ordering::SeqCst);
            let now = number.load(Ordering::SeqCst);
            // If the bit is still set, the thread that clears it increments the number afterwards.
            if watched_slots.load(Ordering::SeqCst) & bit != 0 {
                return now;
            }
        }
    }

    /// How many blocks were freed so far. 0 unless a feature watches frees.
    pub(crate) fn frees(&self) -> u32 {
        self.frees.load(Ordering::Relaxed)
    }

    /// Requests a report when this many blocks are freed. Replaces the last request.
    pub(crate) fn report_at_frees(&self, frees: u32) {
        let [of_frees, _] = &self.requested;
        of_frees.store(frees, Ordering::Relaxed);
        self.set_next_report();
    }

    /// Requests a report with [`Cause::Counters`] when this many more blocks are freed. Replaces the last request.
    pub(crate) fn read_counters_at_frees(&self, more: u32) {
        let [_, of_counters] = &self.requested;
        of_counters.store(self.frees().wrapping_add(more).max(1), Ordering::Relaxed);
        self.set_next_report();
    }

    /// The number of freed blocks at which a report is requested with [`Self::report_at_frees`].
    pub(crate) fn next_report(&self) -> u32 {
        let [of_frees, _] = &self.requested;
        of_frees.load(Ordering::Relaxed)
    }

    /// Which requests were for the number of freed blocks that is reported now. They end with it.
    fn reached(&self) -> [bool; 2] {
        let at = self.report_at.load(Ordering::Relaxed);
        let reached = self
            .requested
            .each_ref()
            .map(|requested| requested.compare_exchange(at, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok());
        self.set_next_report();
        reached
    }

    /// Reports the request that is reached first. The number of freed blocks wraps around.
    fn set_next_report(&self) {
        let frees = self.frees();
        let requested = self.requested.each_ref().map(|requested| requested.load(Ordering::Relaxed));
        let next = requested.into_iter().filter(|at| *at != 0).min_by_key(|at| at.wrapping_sub(frees).wrapping_sub(1));
        self.report_at.store(next.unwrap_or(0), Ordering::Relaxed);
    }

    /// Requests reports of events in a backward pass, or ends them.
    pub(crate) fn report_backward(&self, is_requested: bool) {
        self.reports_backward.store(is_requested, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_frees_of_watched_memory_change_its_number() {
        let mut watch = Watch::new();
        assert_eq!(watch.free_count_at(0x1000), 0);
        watch.watch_frees();
        let addresses: Vec<u64> = (0..500).map(|n| 0x7f00_0000_0000 + n * 0x600).collect();
        let numbers: Vec<u16> = addresses.iter().map(|address| watch.free_count_at(*address)).collect();
        let freed = |n: usize| n.is_multiple_of(7);
        for round in 1..4 {
            addresses.iter().enumerate().filter(|(n, _)| freed(*n)).for_each(|(_, address)| {
                // Only the first free after a question matters. Later allocations and frees at the address concern
                // memory that nobody has asked about.
                (0..round).for_each(|_| {
                    watch.block_freed(*address);
                });
            });
            let now: Vec<u16> = addresses.iter().map(|address| watch.free_count_at(*address)).collect();
            let has_changed = |n: usize| now.get(n) != numbers.get(n);
            assert!((0..addresses.len()).filter(|n| freed(*n)).all(has_changed), "round {round}");
            // Two addresses may share a hash slot.
            let others = (0..addresses.len()).filter(|n| !freed(*n) && has_changed(*n)).count();
            assert!(others < 20, "round {round}: {others} others");
        }
    }

    #[test]
    fn a_threshold_is_reported_once() {
        let mut watch = Watch::new();
        let event = Event { action: Action::FreeRequested, addr: 0x1000, ..Event::EMPTY };
        let reports = std::cell::RefCell::new(Vec::new());
        let note = |watch: &Watch, event: &Event| {
            watch.note(event, |at_threshold| reports.borrow_mut().extend(watch.causes(event, at_threshold)));
        };
        watch.report_at_frees(1);
        note(&watch, &event);
        assert_eq!((watch.frees(), reports.take()), (0, vec![]), "no feature watches frees");
        watch.watch_frees();
        watch.report_at_frees(2);
        (0..5).for_each(|_| note(&watch, &event));
        assert_eq!((watch.frees(), reports.take()), (5, vec![Cause::Frees]));
        // Two features have thresholds of their own.
        watch.report_at_frees(8);
        watch.read_counters_at_frees(1);
        (0..2).for_each(|_| note(&watch, &event));
        assert_eq!((watch.next_report(), reports.take()), (8, vec![Cause::Counters]));
        watch.read_counters_at_frees(1);
        (0..5).for_each(|_| note(&watch, &event));
        assert_eq!((watch.next_report(), reports.take()), (0, vec![Cause::Frees, Cause::Counters]));
        let backward = Event { flags: Flags::IN_BACKWARD, ..Event::EMPTY };
        note(&watch, &backward);
        watch.report_backward(true);
        note(&watch, &backward);
        note(&watch, &Event { action: Action::Oom, ..Event::EMPTY });
        assert_eq!(reports.take(), [Cause::Backward, Cause::OutOfMemory]);
    }
}
