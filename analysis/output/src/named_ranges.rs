//! The ranges that a program names (`record_function`, NVTX), each from its start to its end.
//!
//! Ranges of one thread nest, and those of `nvtxRangeStart` overlap in any way. So a range takes the lowest free row of
//! its thread. Of ranges that nest, an outer one has a lower row than those inside it.

use std::collections::{BTreeSet, HashMap};

use memtrace_insight::passes::RangeNames;
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::{Definitions, Label};
use memtrace_trace::ids::ThreadId;

/// The maximum number of ranges that are open at once. Further ranges are counted.
const MAX_OPEN_RANGES: usize = 1024;

/// The rows of a group of tracks. A slice takes the lowest free row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    next: u32,
    free_rows: BTreeSet<u32>,
}

impl Rows {
    pub(crate) fn take(&mut self) -> u32 {
        self.free_rows.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    pub(crate) fn free(&mut self, row: u32) {
        self.free_rows.insert(row);
    }
}

/// A range that has started, with what its user keeps for it.
#[derive(Clone, Debug)]
pub(crate) struct NamedRange<'a, T> {
    pub(crate) label: &'a Label,
    /// The event that started it.
    pub(crate) start: Event,
    pub(crate) row: u32,
    pub(crate) kept: T,
}

impl<T> NamedRange<'_, T> {
    pub(crate) fn thread(&self) -> ThreadId {
        self.start.thread
    }
}

/// Finds the start that belongs to each end.
#[derive(Clone, Debug)]
pub(crate) struct NamedRanges<'a, T> {
    names: RangeNames<'a>,
    open: Vec<NamedRange<'a, T>>,
    rows: HashMap<ThreadId, Rows>,
    left_out: u64,
}

impl<'a, T> NamedRanges<'a, T> {
    pub(crate) fn new(definitions: &'a Definitions) -> NamedRanges<'a, T> {
        NamedRanges { names: RangeNames::new(definitions), open: Vec::new(), rows: HashMap::new(), left_out: 0 }
    }

    /// The open ranges, in the order of their starts.
    pub(crate) fn open(&mut self) -> impl Iterator<Item = &mut NamedRange<'a, T>> {
        self.open.iter_mut()
    }

    /// The number of ranges that were not followed, because too many were open.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Observes the start or the end of a range, in the order of events. Returns the range that this event ends. `keep`
    /// makes what a new range keeps.
    pub(crate) fn observe(&mut self, e: &Event, keep: impl FnOnce() -> T) -> Option<NamedRange<'a, T>> {
        let label = self.names.label(e)?;
        if e.action == Action::RangeStart {
            if self.open.len() < MAX_OPEN_RANGES {
                let row = self.rows.entry(e.thread).or_default().take();
                self.open.push(NamedRange { label, start: *e, row, kept: keep() });
            } else {
                self.left_out += 1;
            }
            return None;
        }
        let matches = |open: &NamedRange<'_, T>| match (e.label_id(), e.range_number()) {
            (_, number) if open.start.range_number() != number => false,
            (0, 0) => (open.start.thread, open.start.range_domain()) == (e.thread, e.range_domain()),
            (0, _) => true,
            (label, _) => open.start.label_id() == label && open.start.thread == e.thread,
        };
        // A `record_function` range can end on another thread, when a future completes.
        let is_on_other_thread = |open: &NamedRange<'_, T>| e.label_id() != 0 && open.start.label_id() == e.label_id();
        let index = self.open.iter().rposition(matches).or_else(|| self.open.iter().rposition(is_on_other_thread))?;
        let range = self.open.remove(index);
        if let Some(rows) = self.rows.get_mut(&range.thread()) {
            rows.free(range.row);
        }
        Some(range)
    }

    /// The ranges that are still open at the end.
    pub(crate) fn finish(self) -> Vec<NamedRange<'a, T>> {
        self.open
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::definition::LabelOrigin;

    fn event(action: Action, seq: u64, (label, number): (u64, u64), thread: u32) -> Event {
        Event { action, seq, addr: label, size: number, thread: ThreadId(thread), ..Event::EMPTY }
    }

    #[test]
    fn a_range_ends_with_its_own_end_and_has_the_row_of_its_depth() {
        let mut definitions = Definitions::default();
        for (id, text, origin) in [(1, "outer", LabelOrigin::RecordFunction), (2, "inner", LabelOrigin::Nvtx)] {
            definitions.labels.insert(id, Label { origin, text: text.into() });
        }
        let mut ranges = NamedRanges::new(&definitions);
        let mut ended = Vec::new();
        let events = [
            event(Action::RangeStart, 1, (1, 0), 1),
            event(Action::RangeStart, 2, (2, 0), 1),
            // Another thread has rows of its own.
            event(Action::RangeStart, 3, (1, 0), 2),
            // NVTX does not name what it ends.
            event(Action::RangeEnd, 4, (0, 0), 1),
            event(Action::RangeStart, 5, (2, 7), 1),
            event(Action::RangeEnd, 6, (1, 0), 1),
            // A numbered range ends from another thread.
            event(Action::RangeEnd, 7, (0, 7), 2),
            // Its start is older than the recording.
            event(Action::RangeEnd, 8, (2, 0), 3),
        ];
        for e in &events {
            let range = ranges.observe(e, || e.seq * 10);
            ended.extend(range.map(|range| (range.start.seq, e.seq, range.row, range.kept, &*range.label.text)));
        }
        assert_eq!(ended, [(2, 4, 1, 20, "inner"), (1, 6, 0, 10, "outer"), (5, 7, 1, 50, "inner")]);
        let open: Vec<_> = ranges.finish().iter().map(|range| (range.start.seq, range.row)).collect();
        assert_eq!(open, [(3, 0)]);
    }
}
