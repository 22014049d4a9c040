//! Restores one process-wide order for the events from all rings of a process.
//!
//! Every event carries `seq`, its place in the process-wide order. The numbers have no gaps.
//! - An event is released when every smaller number has been released or given up.
//! - A missing number is given up when an event with a larger number has waited for [`GAP_TIMEOUT`].
//! - It is also given up when the waiting events would exceed [`MAX_WINDOW`], and at the end. Numbers that are given up
//!   are counted.
//! - An event that is [`MAX_WINDOW`] or more places ahead should stay in its ring until [`Merge::has_place`] allows it.
//!   Its ring then fills and its thread waits, so an interrupted thread can publish its event.
//! - An event whose number was given up is late. It is released at once, out of order, and counted.
//! - An event with an impossible number is treated the same way. Its number was used before or is more than
//!   [`MAX_GAP`] ahead. The library writes no such numbers, and they must not push valid events out of the window.
//!
//! A reader of the output therefore sees ascending numbers, except for late events. `lost` is the number of events that
//! never arrived.

use std::collections::VecDeque;
use std::time::Duration;

use memtrace_trace::event::Event;

/// How long a missing event is waited for.
///
/// A thread may be interrupted between taking its number and publishing its event. It resumes much earlier than this,
/// unless it was killed or stopped.
pub(crate) const GAP_TIMEOUT: Duration = Duration::from_secs(1);
/// The maximum number of places in the window, present and missing events together: 5 MiB of events.
pub(crate) const MAX_WINDOW: usize = 1 << 16;
/// The largest jump in numbers that counts as a gap. Larger jumps are treated as corrupt numbers.
pub(crate) const MAX_GAP: u64 = u32::MAX as u64;

/// The minimum time between two marks. It bounds the number of marks.
const MARK_INTERVAL: Duration = Duration::from_millis(50);
/// The capacity, in places, above which an empty window releases its memory.
const KEEP_CAPACITY: usize = 1 << 14;

/// Records that the event with number `seq` was in the window at time `at`.
#[derive(Clone, Copy, Debug)]
struct Mark {
    seq: u64,
    at: Duration,
}

/// The reorder window of one process.
#[derive(Debug)]
pub(crate) struct Merge {
    /// The smallest number that was neither released nor given up.
    next: u64,
    /// Place `i` belongs to number `next + i`.
    ///
    /// The last place always holds an event. The first place is always empty, because an event there would be released.
    window: VecDeque<Option<Event>>,
    marks: VecDeque<Mark>,
    given_up: u64,
    came_late: u64,
    misnumbered: u64,
}

impl Default for Merge {
    fn default() -> Merge {
        Merge { next: 1, window: VecDeque::new(), marks: VecDeque::new(), given_up: 0, came_late: 0, misnumbered: 0 }
    }
}

impl Merge {
    /// The number of events that have not arrived so far.
    pub(crate) fn lost(&self) -> u64 {
        self.given_up.saturating_sub(self.came_late)
    }

    /// The number of events that were released out of order.
    pub(crate) fn late(&self) -> u64 {
        self.came_late + self.misnumbered
    }

    /// Whether the window holds events back.
    #[cfg(test)]
    fn is_waiting(&self) -> bool {
        !self.window.is_empty()
    }

    /// The smallest number that was neither released nor given up.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// The number after the last event that was inserted.
    pub(crate) fn end(&self) -> u64 {
        self.next + self.window.len() as u64
    }

    /// Whether an event with this number can be inserted without giving up other numbers.
    pub(crate) fn has_place(&self, seq: u64) -> bool {
        // Impossible numbers need no place: they are released at once.
        !(MAX_WINDOW as u64..=MAX_GAP).contains(&seq.saturating_sub(self.next))
    }

    /// Gives up every missing number below `seq`, because no smaller number will arrive any more.
    pub(crate) fn give_up_below(&mut self, seq: u64, release: &mut impl FnMut(Event)) {
        self.advance_to(seq, release);
        self.release_ready(release);
    }

    /// Continues with `seq`: the numbers before, of which none is present, were never given to an event.
    pub(crate) fn skip_to(&mut self, seq: u64, release: &mut impl FnMut(Event)) {
        if self.window.is_empty() && seq > self.next {
            self.next = seq;
        } else {
            let given_up = self.given_up;
            self.give_up_below(seq, release);
            self.given_up = given_up;
        }
    }

    /// Inserts one event. Every event that is now due goes to `release`, in order.
    pub(crate) fn insert(&mut self, event: Event, release: &mut impl FnMut(Event)) {
        let Some(ahead) = event.seq.checked_sub(self.next) else {
            self.came_late += 1;
            return release(event);
        };
        if ahead > MAX_GAP {
            self.misnumbered += 1;
            return release(event);
        }
        if ahead == 0 && self.window.is_empty() {
            self.next += 1;
            return release(event);
        }
        if ahead >= MAX_WINDOW as u64 {
            self.give_up_below(event.seq - MAX_WINDOW as u64 + 1, release);
            // The releases may have advanced `next` to this event's number.
            if event.seq == self.next && self.window.is_empty() {
                self.next += 1;
                return release(event);
            }
        }
        let place = (event.seq - self.next) as usize;
        if self.window.len() <= place {
            self.window.resize(place + 1, None);
        }
        match self.window.get_mut(place) {
            Some(free @ None) => *free = Some(event),
            _ => {
                self.misnumbered += 1;
                release(event);
            }
        }
        self.release_ready(release);
    }

    fn release_ready(&mut self, release: &mut impl FnMut(Event)) {
        while let Some(Some(_)) = self.window.front() {
            if let Some(Some(event)) = self.window.pop_front() {
                self.next += 1;
                release(event);
            }
        }
    }

    /// Gives up every missing number below `seq` and releases the events that are present.
    fn advance_to(&mut self, seq: u64, release: &mut impl FnMut(Event)) {
        while self.next < seq {
            match self.window.pop_front() {
                Some(Some(event)) => {
                    self.next += 1;
                    release(event);
                }
                Some(None) => {
                    self.next += 1;
                    self.given_up += 1;
                }
                None => {
                    self.given_up += seq - self.next;
                    self.next = seq;
                }
            }
        }
    }

    /// The number of places for which memory is allocated.
    pub(crate) fn places(&self) -> usize {
        self.window.capacity()
    }

    /// Gives up the oldest gaps until at most `places` places are held, and frees the memory of the others.
    pub(crate) fn keep_places(&mut self, places: usize, release: &mut impl FnMut(Event)) {
        let surplus = self.window.len().saturating_sub(places);
        self.give_up_below(self.next + surplus as u64, release);
        self.window.shrink_to(places);
    }

    /// Runs periodically, after the rings were drained.
    ///
    /// `now` counts only the time during which the rings are drained. It must not advance while the launcher itself is
    /// stopped.
    pub(crate) fn tick(&mut self, now: Duration, release: &mut impl FnMut(Event)) {
        if self.window.is_empty() {
            self.marks.clear();
            if self.window.capacity() > KEEP_CAPACITY {
                self.window = VecDeque::new();
            }
            return;
        }
        let highest = self.next + (self.window.len() as u64 - 1);
        if self.marks.back().is_none_or(|m| m.seq < highest && now.saturating_sub(m.at) >= MARK_INTERVAL) {
            self.marks.push_back(Mark { seq: highest, at: now });
        }
        while let Some(mark) = self.marks.front().copied().filter(|m| now.saturating_sub(m.at) >= GAP_TIMEOUT) {
            self.marks.pop_front();
            self.give_up_below(mark.seq, release);
        }
    }

    /// Releases every event. Missing numbers below `issued`, the first number never handed out, count as lost.
    pub(crate) fn finish(&mut self, issued: u64, release: &mut impl FnMut(Event)) {
        let highest = self.next + self.window.len() as u64;
        self.advance_to(highest, release);
        // Ignore an implausible value: the traced process can overwrite this header field.
        if issued.saturating_sub(self.next) <= MAX_GAP {
            self.advance_to(issued, release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn event(seq: u64) -> Event {
        Event { seq, ..Event::EMPTY }
    }

    #[test]
    fn numbers_that_no_event_was_given_are_skipped_and_not_lost() {
        const LIVE: u64 = 1 << 24;
        let (mut merge, mut out) = (Merge::default(), Vec::new());
        merge.insert(event(1), &mut |event| out.push(event.seq));
        assert!(!merge.has_place(LIVE), "it waits in its ring");
        merge.skip_to(LIVE, &mut |event| out.push(event.seq));
        assert!(merge.has_place(LIVE));
        merge.insert(event(LIVE), &mut |event| out.push(event.seq));
        assert_eq!((out, merge.lost(), merge.next()), (vec![1, LIVE], 0, LIVE + 1));
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u64),
        Tick(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![8 => (1u64..60).prop_map(Step::Insert), 1 => (0u64..1500).prop_map(Step::Tick)];
        prop::collection::vec(step, 0..150)
    }

    /// A naive model of the rule: a list of waiting numbers with their arrival times.
    #[derive(Default)]
    struct Model {
        next: u64,
        waiting: Vec<(u64, Duration)>,
        given_up: u64,
        late: u64,
        out: Vec<u64>,
    }

    impl Model {
        fn ready(&mut self) {
            while let Some(i) = self.waiting.iter().position(|w| w.0 == self.next) {
                self.out.push(self.waiting.swap_remove(i).0);
                self.next += 1;
            }
        }
        fn advance(&mut self, to: u64) {
            while self.next < to {
                if self.waiting.iter().any(|w| w.0 == self.next) {
                    self.ready();
                } else {
                    self.given_up += 1;
                    self.next += 1;
                }
            }
            self.ready();
        }
    }

    proptest! {
        /// Ticks in the model are at least [`MARK_INTERVAL`] apart, so the spacing of marks has no effect.
        #[test]
        fn releases_events_as_the_model_does(steps in steps()) {
            let mut merge = Merge::default();
            let mut out = Vec::new();
            let mut model = Model { next: 1, ..Model::default() };
            let mut now = Duration::ZERO;
            let mut seen = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Insert(seq) => {
                        if !seen.insert(seq) {
                            continue;
                        }
                        merge.insert(event(seq), &mut |e| out.push(e.seq));
                        if seq < model.next {
                            model.late += 1;
                            model.out.push(seq);
                        } else {
                            // The next tick sets the arrival time, because the window notices arrivals at ticks.
                            model.waiting.push((seq, Duration::MAX));
                            model.ready();
                        }
                    }
                    Step::Tick(ms) => {
                        now += MARK_INTERVAL + Duration::from_millis(ms);
                        merge.tick(now, &mut |e| out.push(e.seq));
                        model.waiting.iter_mut().filter(|w| w.1 == Duration::MAX).for_each(|w| w.1 = now);
                        let old = model.waiting.iter().filter(|w| now - w.1 >= GAP_TIMEOUT).map(|w| w.0).max();
                        if let Some(old) = old {
                            model.advance(old);
                        }
                    }
                }
                prop_assert_eq!(&out, &model.out);
                prop_assert_eq!(merge.next(), model.next);
                prop_assert_eq!((merge.given_up, merge.late()), (model.given_up, model.late));
                prop_assert_eq!(merge.is_waiting(), !model.waiting.is_empty());
            }
            merge.finish(80, &mut |e| out.push(e.seq));
            model.advance(80);
            prop_assert_eq!(&out, &model.out);
            prop_assert_eq!(merge.given_up, model.given_up);
            prop_assert_eq!(out.len(), seen.len());
            prop_assert_eq!(merge.lost() as usize, 79 - seen.len());
        }

        #[test]
        fn any_sequence_numbers_are_released(seqs in prop::collection::vec(any::<u64>(), 0..20), issued: u64) {
            let mut merge = Merge::default();
            let mut count = 0;
            for &seq in &seqs {
                merge.insert(event(seq & (u64::MAX >> 1)), &mut |_| count += 1);
            }
            merge.finish(issued, &mut |_| count += 1);
            prop_assert_eq!(count, seqs.len());
            prop_assert!(!merge.is_waiting());
        }
    }

    #[test]
    fn a_full_window_gives_up_the_oldest_gap() {
        let mut merge = Merge::default();
        let mut out = Vec::new();
        for seq in 2..=MAX_WINDOW as u64 {
            merge.insert(event(seq), &mut |e| out.push(e.seq));
        }
        assert!(out.is_empty());
        merge.insert(event(MAX_WINDOW as u64 + 1), &mut |e| out.push(e.seq));
        assert_eq!(out.len(), MAX_WINDOW);
        assert_eq!((merge.lost(), merge.late()), (1, 0));
        merge.insert(event(1), &mut |e| out.push(e.seq));
        assert_eq!((merge.lost(), merge.late()), (0, 1));
    }

    #[test]
    fn a_window_frees_memory() {
        let mut merge = Merge::default();
        let mut out = Vec::new();
        for seq in [2, 900, 1000, 5000] {
            merge.insert(event(seq), &mut |e| out.push(e.seq));
        }
        assert!(out.is_empty() && merge.places() >= 5000);
        merge.keep_places(100, &mut |e| out.push(e.seq));
        assert_eq!(out, [2, 900, 1000]);
        assert!(merge.is_waiting() && merge.places() < 1000, "{}", merge.places());
        merge.finish(5001, &mut |e| out.push(e.seq));
        assert_eq!((out.len(), merge.lost()), (4, 4996));
    }

    #[test]
    fn events_that_have_a_place_are_never_lost() {
        // One thread holds the first number back, and another thread stops at the last place.
        let mut merge = Merge::default();
        let mut out = Vec::new();
        let beyond = (2..).find(|&seq| {
            let has_place = merge.has_place(seq);
            if has_place {
                merge.insert(event(seq), &mut |e| out.push(e.seq));
            }
            !has_place
        });
        assert_eq!((beyond, out.len()), (Some(MAX_WINDOW as u64 + 1), 0));
        assert!(merge.has_place(0) && merge.has_place(1) && merge.has_place(u64::MAX));
        merge.insert(event(1), &mut |e| out.push(e.seq));
        assert!(merge.has_place(MAX_WINDOW as u64 + 1));
        assert_eq!((out.len(), merge.lost(), merge.late()), (MAX_WINDOW, 0, 0));
        merge.give_up_below(MAX_WINDOW as u64 + 4, &mut |e| out.push(e.seq));
        assert_eq!((merge.next(), merge.lost()), (MAX_WINDOW as u64 + 4, 3));
    }

    #[test]
    fn many_gaps_time_out_together() {
        let mut merge = Merge::default();
        let mut out = Vec::new();
        for seq in (2..1000).step_by(2) {
            merge.insert(event(seq), &mut |e| out.push(e.seq));
        }
        merge.tick(SECOND, &mut |e| out.push(e.seq));
        assert!(out.is_empty());
        merge.tick(2 * SECOND, &mut |e| out.push(e.seq));
        assert_eq!(out.len(), 499);
        assert_eq!(merge.lost(), 499);
    }
}
