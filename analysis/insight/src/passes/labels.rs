//! The memory use inside the ranges that the program named (`record_function`, NVTX, `gpu_memtrace.annotate`), with one
//! row per name.
//!
//! A range is a time range. It covers all changes to the device's memory between its start and its end, on any thread,
//! because a backward pass runs on autograd's threads. Names that differ only in a trailing number (`ProfilerStep#3`,
//! `step_17`) share a row. A range inside another range of the same row counts as one entry, but its bytes count only
//! once. A range that is still open when the recording ends, ends there. An end without a start belongs to a range
//! older than the recording, and is ignored.

use std::collections::HashMap;

use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::ThreadId;

use super::open_ranges::MAX_OPEN;
use super::pass::{BlockAllocated, BlockFreed, Pass, RecordingEnd, RecordingStart};
use crate::rules::{PhaseRuleId, label_rule};

/// The maximum number of rows. Further names are only counted.
const MAX_ROWS: usize = 256;

/// The memory use inside the ranges of one name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LabelRow {
    /// The name. A trailing `*` stands for the number if several names share the row: `ProfilerStep#*`, `step_*`.
    pub name: Box<str>,
    /// The API that named the range.
    pub origin: LabelOrigin,
    /// The rule that identifies it as one of PyTorch's own ranges.
    pub rule: Option<PhaseRuleId>,
    /// The number of times that a range was entered.
    pub times: u64,
    /// The bytes and blocks allocated and freed inside.
    pub totals: LabelTotals,
    /// Bytes allocated inside a range and still allocated when it ended.
    pub kept: u64,
    /// The highest number of allocated bytes inside.
    pub peak: u64,
    /// Allocated bytes at the end of the last range.
    pub after: u64,
    /// The total time inside, in clock ticks.
    pub ticks: u64,
    /// The time of the first entry, in clock ticks.
    pub started: u64,
}

/// Allocations and frees.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LabelTotals {
    /// The number of blocks allocated.
    pub allocations: u64,
    /// The number of bytes allocated.
    pub allocated: u64,
    /// The number of blocks freed.
    pub frees: u64,
    /// The number of bytes freed.
    pub freed: u64,
}

impl LabelTotals {
    /// Adds what changed from `before` to `now`.
    fn add_change(&mut self, before: &LabelTotals, now: &LabelTotals) {
        self.allocations += now.allocations - before.allocations;
        self.allocated += now.allocated - before.allocated;
        self.frees += now.frees - before.frees;
        self.freed += now.freed - before.freed;
    }
}

/// A range that has started and not ended.
#[derive(Clone, Debug)]
struct Open {
    label: u64,
    origin: LabelOrigin,
    thread: ThreadId,
    domain: u64,
    number: u64,
    row: usize,
    /// Whether another range of the same row was already open.
    inner: bool,
    seq: u64,
    ticks: u64,
    before: LabelTotals,
    peak: u64,
    /// Bytes allocated inside and freed again.
    own_freed: u64,
}

/// The rows of one device.
#[derive(Clone, Debug, Default)]
pub struct LabelTable {
    rows: Vec<LabelRow>,
    left_out: u64,
}

impl LabelTable {
    /// The rows, in the order in which the names appeared.
    pub fn rows(&self) -> &[LabelRow] {
        &self.rows
    }

    /// The number of names without a row.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }
}

/// Builds the rows while a recording streams. Events must come in the order of `seq`.
#[derive(Clone, Debug, Default)]
pub(crate) struct LabelCollector {
    table: LabelTable,
    /// By label: its row, and the API that named it.
    labels: HashMap<u64, (usize, LabelOrigin)>,
    open: Vec<Open>,
    totals: LabelTotals,
    level: u64,
    /// The highest number of allocated bytes since a range last started or ended.
    highest: u64,
}

/// The name with its trailing number replaced by `*`. A name without such a number, or that is only a number, stays
/// unchanged.
pub(crate) fn folded(text: &str) -> String {
    let stem = text.trim_end_matches(|c: char| c.is_ascii_digit());
    if stem.len() == text.len() || stem.is_empty() { text.to_owned() } else { format!("{stem}*") }
}

impl From<LabelCollector> for LabelTable {
    fn from(collector: LabelCollector) -> LabelTable {
        collector.table
    }
}

impl Pass for LabelCollector {
    fn started(start: &RecordingStart<'_>) -> LabelCollector {
        LabelCollector::new(start.definitions)
    }

    #[inline]
    fn range(&mut self, e: &Event) {
        self.observe(e);
    }

    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let level = allocated.usage.allocated;
        if allocated.is_earlier {
            self.starts_at(level);
        } else {
            self.alloc(allocated.block.memory.size, level);
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        self.free(freed.block.seq, freed.block.memory.size, freed.usage.allocated);
    }

    fn finish(&mut self, end: &RecordingEnd<'_>) {
        self.close_all(end.last.ticks);
    }
}

impl LabelCollector {
    fn new(definitions: &Definitions) -> LabelCollector {
        let (mut table, mut labels) = (LabelTable::default(), HashMap::new());
        let mut places: HashMap<(LabelOrigin, String), usize> = HashMap::new();
        for (id, label) in &definitions.labels {
            let origin = label.origin;
            let name = folded(&label.text);
            let has_room = places.len() < MAX_ROWS;
            let row = match places.get(&(origin, name.clone())) {
                Some(row) => *row,
                None if has_room => {
                    let rule = label_rule(label).map(|rule| rule.id);
                    let row = places.len();
                    table.rows.push(LabelRow { name: name.as_str().into(), origin, rule, ..LabelRow::default() });
                    places.insert((origin, name), row);
                    row
                }
                None => {
                    table.left_out += 1;
                    continue;
                }
            };
            labels.insert(u64::from(*id), (row, origin));
        }
        // A row of a single label carries that label's full name.
        let mut alone: Vec<Option<&str>> = vec![None; table.rows.len()];
        let mut shared = vec![false; table.rows.len()];
        for (id, label) in &definitions.labels {
            if let Some((row, _)) = labels.get(&u64::from(*id)) {
                shared[*row] |= alone[*row].replace(&label.text).is_some();
            }
        }
        for (row, (name, shared)) in table.rows.iter_mut().zip(alone.into_iter().zip(shared)) {
            if let Some(name) = name.filter(|_| !shared) {
                row.name = name.into();
            }
        }
        LabelCollector { table, labels, ..LabelCollector::default() }
    }

    /// `level` has the allocated bytes after the allocation.
    #[inline]
    fn alloc(&mut self, bytes: u64, level: u64) {
        self.totals.allocations += 1;
        self.totals.allocated += bytes;
        self.level = level;
        self.highest = self.highest.max(level);
    }

    /// States that `level` bytes are allocated before the first event.
    fn starts_at(&mut self, level: u64) {
        self.level = level;
        self.highest = level;
    }

    /// `allocated` is `seq` of the block's allocation. `level` has the allocated bytes after the free.
    #[inline]
    fn free(&mut self, allocated: u64, bytes: u64, level: u64) {
        self.totals.frees += 1;
        self.totals.freed += bytes;
        self.level = level;
        for open in &mut self.open {
            if open.seq < allocated {
                open.own_freed += bytes;
            }
        }
    }

    fn observe(&mut self, e: &Event) {
        for open in &mut self.open {
            open.peak = open.peak.max(self.highest);
        }
        self.highest = self.level;
        if e.action == Action::RangeStart {
            self.start(e);
            return;
        }
        let is_it = |open: &Open| match (e.label_id(), e.range_number()) {
            (0, 0) => {
                open.origin == LabelOrigin::Nvtx
                    && open.number == 0
                    && (open.thread, open.domain) == (e.thread, e.range_domain())
            }
            (0, number) => open.number == number,
            (label, _) => open.label == label && open.thread == e.thread,
        };
        // A `record_function` range can end on another thread, when a future completes.
        let elsewhere = |open: &Open| e.label_id() != 0 && open.label == e.label_id();
        let index = self.open.iter().rposition(is_it).or_else(|| self.open.iter().rposition(elsewhere));
        if let Some(index) = index {
            let open = self.open.remove(index);
            self.close(open, e.seq, e.ticks);
        }
    }

    fn start(&mut self, e: &Event) {
        let Some((row, origin)) = self.labels.get(&e.label_id()).copied() else { return };
        let entry = &mut self.table.rows[row];
        if entry.times == 0 {
            entry.started = e.ticks;
        }
        entry.times += 1;
        if self.open.len() >= MAX_OPEN {
            return;
        }
        self.open.push(Open {
            label: e.label_id(),
            origin,
            thread: e.thread,
            domain: e.range_domain(),
            number: e.range_number(),
            row,
            inner: self.open.iter().any(|open| open.row == row),
            seq: e.seq,
            ticks: e.ticks,
            before: self.totals,
            peak: self.level,
            own_freed: 0,
        });
    }

    /// Ends a range at an event.
    fn close(&mut self, open: Open, seq: u64, ticks: u64) {
        if open.inner {
            return;
        }
        let (now, before) = (self.totals, open.before);
        let row = &mut self.table.rows[open.row];
        row.totals.add_change(&before, &now);
        row.kept += now.allocated - before.allocated - open.own_freed;
        row.peak = row.peak.max(open.peak);
        row.after = self.level;
        row.ticks += ticks.saturating_sub(open.ticks);
        // Another open range of the same row measures from here on.
        let (totals, level) = (now, self.level);
        if let Some(next) = self.open.iter_mut().find(|other| other.row == open.row) {
            *next = Open { inner: false, before: totals, peak: level, own_freed: 0, seq, ticks, ..next.clone() };
        }
    }

    /// Ends all open ranges at `ticks`, the time of the last event.
    fn close_all(&mut self, ticks: u64) {
        for open in &mut self.open {
            open.peak = open.peak.max(self.highest);
        }
        while let Some(open) = self.open.pop() {
            let outer = self.open.iter().any(|other| other.row == open.row);
            self.close(Open { inner: open.inner || outer, ..open }, u64::MAX, ticks);
        }
        self.table.rows.retain(|row| row.times > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::event::Source;
    use memtrace_trace::file::Label;

    fn definitions(labels: &[(&str, LabelOrigin)]) -> Definitions {
        let mut definitions = Definitions::default();
        for (id, (text, origin)) in (1..).zip(labels) {
            definitions.labels.insert(id, Label { origin: *origin, text: (*text).into() });
        }
        definitions
    }

    fn event(action: Action, seq: u64, label: u64, thread: u32) -> Event {
        let (source, thread) = (Source::Label, ThreadId(thread));
        Event { action, seq, ticks: seq * 10, addr: label, source, thread, ..Event::EMPTY }
    }

    const START: Action = Action::RangeStart;
    const END: Action = Action::RangeEnd;

    /// A block in the part that two ranges of one name share counts for the range that ends first.
    #[test]
    fn an_overlapping_range_of_the_same_name_measures_from_the_end_of_the_first() {
        let mut collector = LabelCollector::new(&definitions(&[("pass", LabelOrigin::RecordFunction)]));
        collector.observe(&event(START, 1, 1, 1));
        collector.observe(&event(START, 2, 1, 2));
        collector.alloc(100, 100); // 3
        collector.observe(&event(END, 4, 1, 1));
        collector.free(3, 100, 0);
        collector.alloc(40, 40); // 6
        collector.observe(&event(END, 7, 1, 2));
        let row = &collector.table.rows()[0];
        assert_eq!((row.times, row.totals.allocated, row.totals.freed, row.kept), (2, 140, 100, 140));
    }

    #[test]
    fn ranges_measure_what_happens_inside() {
        let mut collector =
            LabelCollector::new(&definitions(&[("outer", LabelOrigin::RecordFunction), ("n", LabelOrigin::Nvtx)]));
        collector.alloc(100, 100); // 1
        collector.observe(&event(START, 2, 1, 1));
        collector.alloc(50, 150); // 3
        collector.observe(&event(START, 4, 2, 1));
        collector.alloc(7, 157); // 5
        collector.free(3, 50, 107); // 6
        collector.observe(&event(END, 7, 0, 2)); // another thread's range: ignored
        collector.observe(&event(END, 8, 0, 1));
        collector.free(1, 100, 7); // 9
        collector.observe(&event(END, 10, 1, 1));
        collector.alloc(1000, 1007);
        collector.close_all(200);
        let [outer, inner] = collector.table.rows() else { panic!("{collector:?}") };
        let totals = LabelTotals { allocations: 2, allocated: 57, frees: 2, freed: 150 };
        assert_eq!((outer.times, outer.totals), (1, totals));
        assert_eq!((outer.kept, outer.peak, outer.after, outer.ticks), (7, 157, 7, 80));
        assert_eq!(
            (inner.totals.allocated, inner.totals.freed, inner.kept, inner.peak, inner.after),
            (7, 50, 7, 157, 107)
        );
        assert_eq!((inner.origin, outer.origin), (LabelOrigin::Nvtx, LabelOrigin::RecordFunction));
    }

    #[test]
    fn numbered_names_share_a_row_and_nested_ranges_count_once() {
        let names = ["step_1", "step_2", "17", "alone 3"];
        let mut collector = LabelCollector::new(&definitions(&names.map(|name| (name, LabelOrigin::RecordFunction))));
        for (seq, label) in [(1, 1), (10, 2)] {
            collector.observe(&event(START, seq, label, 1));
            collector.alloc(5, 5);
            collector.free(seq + 1, 5, 0);
            collector.observe(&event(END, seq + 5, label, 1));
        }
        // The ranges overlap, and the one that started first ends first.
        collector.observe(&event(START, 20, 1, 1));
        collector.alloc(1, 1);
        collector.observe(&event(START, 22, 2, 1));
        collector.alloc(2, 3);
        collector.observe(&event(END, 24, 1, 1));
        collector.alloc(4, 7);
        collector.observe(&event(END, 26, 2, 1));
        collector.observe(&event(START, 30, 4, 1));
        collector.close_all(0);
        let names: Vec<_> =
            collector.table.rows().iter().map(|row| (&*row.name, row.times, row.totals.allocated)).collect();
        assert_eq!(names, [("step_*", 4, 17), ("alone 3", 1, 0)]);
    }

    #[test]
    fn rows_are_bounded() {
        let names: Vec<String> = (0..MAX_ROWS + 9).map(|n| format!("name {n} of many")).collect();
        let labels: Vec<_> = names.iter().map(|name| (name.as_str(), LabelOrigin::RecordFunction)).collect();
        let mut collector = LabelCollector::new(&definitions(&labels));
        (1..=labels.len() as u64).for_each(|label| collector.observe(&event(START, label, label, 1)));
        collector.close_all(0);
        assert_eq!((collector.table.rows().len(), collector.table.left_out()), (MAX_ROWS, 9));
    }
}
