//! Which of the program's named ranges are open on each thread.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::ThreadId;

use crate::passes::labels::folded;
use crate::rules::label_rule;

/// The maximum number of names, of open ranges and of combinations. Further ones do not count.
const MAX_ROWS: usize = 256;
const MAX_OPEN: usize = 64;
const MAX_SETS: usize = 4096;

/// The ranges of one name. Names that differ only in a trailing number are one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct RangeRow {
    index: usize,
    name: Box<str>,
}

/// The rows of the program's own ranges, by label.
pub(super) fn range_rows(definitions: &Definitions) -> BTreeMap<u64, RangeRow> {
    let mut indices: HashMap<String, usize> = HashMap::new();
    let mut rows = BTreeMap::new();
    for (id, label) in definitions.labels.iter().filter(|(_, label)| label_rule(label).is_none()) {
        let name = folded(&label.text);
        let next = indices.len();
        if next < MAX_ROWS || indices.contains_key(&name) {
            let index = *indices.entry(name.clone()).or_insert(next);
            rows.insert(u64::from(*id), RangeRow { index, name: name.into() });
        }
    }
    rows
}

/// A combination of open ranges. The default has none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct RangeSetId(u32);

/// The open ranges of all threads.
#[derive(Clone, Debug, Default)]
pub(super) struct OpenRangeSets {
    rows: Arc<BTreeMap<u64, RangeRow>>,
    /// By row: how often a range was entered.
    starts: Vec<u64>,
    open: Vec<(ThreadId, Vec<usize>, RangeSetId)>,
    sets: Vec<Vec<usize>>,
    ids: HashMap<Vec<usize>, RangeSetId>,
}

impl OpenRangeSets {
    pub(super) fn new(rows: &Arc<BTreeMap<u64, RangeRow>>) -> OpenRangeSets {
        OpenRangeSets { rows: rows.clone(), sets: vec![Vec::new()], ..OpenRangeSets::default() }
    }

    /// Observes the start or the end of a range.
    pub(super) fn observe(&mut self, e: &Event) {
        let row = self.rows.get(&e.label_id()).map(|row| row.index);
        let place = match self.open.iter().position(|(thread, ..)| *thread == e.thread) {
            Some(place) => place,
            None => {
                self.open.push((e.thread, Vec::new(), RangeSetId::default()));
                self.open.len() - 1
            }
        };
        let open = &mut self.open[place].1;
        match (e.action, row) {
            (Action::RangeStart, Some(row)) => {
                if row >= self.starts.len() {
                    self.starts.resize(row + 1, 0);
                }
                self.starts[row] += 1;
                if open.len() < MAX_OPEN {
                    open.push(row);
                }
            }
            // The end of an NVTX range does not name it.
            (Action::RangeEnd, None) if e.label_id() == 0 => _ = open.pop(),
            (Action::RangeEnd, Some(row)) => {
                if let Some(at) = open.iter().rposition(|one| *one == row) {
                    open.remove(at);
                }
            }
            _ => return,
        }
        let set = self.open[place].1.clone();
        self.open[place].2 = self.id(set);
    }

    fn id(&mut self, set: Vec<usize>) -> RangeSetId {
        if set.is_empty() {
            return RangeSetId::default();
        }
        if let Some(id) = self.ids.get(&set) {
            return *id;
        }
        if self.sets.len() >= MAX_SETS {
            return RangeSetId::default();
        }
        let id = RangeSetId(self.sets.len() as u32);
        self.sets.push(set.clone());
        self.ids.insert(set, id);
        id
    }

    /// The ranges that are open on a thread.
    pub(super) fn of(&self, thread: ThreadId) -> RangeSetId {
        self.open.iter().find(|(one, ..)| *one == thread).map_or_else(RangeSetId::default, |(.., id)| *id)
    }

    /// The rows of a combination, from the outermost range to the innermost.
    pub(super) fn rows_of(&self, id: RangeSetId) -> &[usize] {
        self.sets.get(id.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// By row: how often a range was entered.
    pub(super) fn starts(&self) -> &[u64] {
        &self.starts
    }

    /// The name of a row.
    pub(super) fn name(&self, row: usize) -> &str {
        self.rows.values().find(|one| one.index == row).map_or("", |one| &one.name)
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::definition::LabelOrigin;
    use memtrace_trace::file::Label;

    use super::*;

    #[test]
    fn the_open_ranges_of_a_thread_are_its_own() {
        let mut definitions = Definitions::default();
        for (id, text) in (1..).zip(["request_1", "request_2", "layer"]) {
            definitions.labels.insert(id, Label { origin: LabelOrigin::Nvtx, text: text.into() });
        }
        let mut sets = OpenRangeSets::new(&Arc::new(range_rows(&definitions)));
        let event = |action, addr, thread| Event { action, addr, thread: ThreadId(thread), ..Event::EMPTY };
        let names = |sets: &OpenRangeSets, thread| {
            let rows = sets.rows_of(sets.of(ThreadId(thread)));
            rows.iter().map(|row| sets.name(*row).to_owned()).collect::<Vec<_>>()
        };
        sets.observe(&event(Action::RangeStart, 1, 1));
        sets.observe(&event(Action::RangeStart, 3, 1));
        sets.observe(&event(Action::RangeStart, 3, 2));
        assert_eq!(
            (names(&sets, 1), names(&sets, 2)),
            (vec!["request_*".into(), "layer".into()], vec!["layer".into()])
        );
        sets.observe(&event(Action::RangeEnd, 0, 1));
        assert_eq!(names(&sets, 1), ["request_*"]);
        sets.observe(&event(Action::RangeEnd, 1, 1));
        sets.observe(&event(Action::RangeStart, 2, 1));
        assert_eq!((names(&sets, 1), sets.starts()), (vec!["request_*".to_owned()], &[2, 2][..]));
    }
}
