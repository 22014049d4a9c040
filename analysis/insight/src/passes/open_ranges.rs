//! The ranges that the program named and has not left.

use std::collections::BTreeMap;

use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::{Definitions, Label};

/// The maximum number of open ranges. Further ranges are counted but not measured.
pub(super) const MAX_OPEN: usize = 1024;

/// Finds the label of a range event. The end of some ranges does not have its label
/// ([`end_has_label`](memtrace_trace::definition::LabelOrigin::end_has_label)); the matching start does.
#[derive(Clone, Debug)]
pub struct RangeNames<'a> {
    labels: &'a BTreeMap<u32, Label>,
    open: Vec<Event>,
}

impl<'a> RangeNames<'a> {
    /// For the ranges of a recording.
    pub fn new(definitions: &'a Definitions) -> RangeNames<'a> {
        RangeNames { labels: &definitions.labels, open: Vec::new() }
    }

    /// The label of this event. Call it for every range event in order. `None` for an end whose start is not in the
    /// recording.
    pub fn label(&mut self, e: &Event) -> Option<&'a Label> {
        let label = |id: u64| self.labels.get(&u32::try_from(id).ok()?);
        if e.label_id() != 0 {
            let label = label(e.label_id())?;
            if e.action == Action::RangeStart && !label.origin.end_has_label() && self.open.len() < MAX_OPEN {
                self.open.push(*e);
            } else if e.action == Action::RangeEnd
                && let Some(index) =
                    self.open.iter().rposition(|open| open.label_id() == e.label_id() && open.thread == e.thread)
            {
                self.open.remove(index);
            }
            return Some(label);
        }
        let domain = |e: &Event| (e.thread, e.range_domain());
        let index = self.open.iter().rposition(|open| {
            open.range_number() == e.range_number() && (e.range_number() != 0 || domain(open) == domain(e))
        })?;
        let open = self.open.remove(index);
        label(open.label_id())
    }
}

/// Where the ranges of one name begin, or all of them have ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RangeBoundary {
    Start,
    End,
}

/// Counts the open ranges of one name.
#[derive(Clone, Debug)]
pub(super) struct OpenRanges<'a> {
    name: &'a str,
    names: RangeNames<'a>,
    open: u64,
}

impl<'a> OpenRanges<'a> {
    /// For the ranges of this name in a recording.
    pub(super) fn new(name: &'a str, definitions: &'a Definitions) -> OpenRanges<'a> {
        OpenRanges { name, names: RangeNames::new(definitions), open: 0 }
    }

    /// Whether the recording has the name.
    pub(super) fn can_open(&self) -> bool {
        self.names.labels.values().any(|label| &*label.text == self.name)
    }

    /// Returns whether the first open range of the name starts with this event, or the last one ends.
    pub(super) fn observe(&mut self, e: &Event) -> Option<RangeBoundary> {
        if self.names.label(e).is_none_or(|label| &*label.text != self.name) {
            return None;
        }
        let was_open = self.is_open();
        self.open = match e.action {
            Action::RangeStart => self.open + 1,
            _ => self.open.saturating_sub(1),
        };
        match (was_open, self.is_open()) {
            (false, true) => Some(RangeBoundary::Start),
            (true, false) => Some(RangeBoundary::End),
            _ => None,
        }
    }

    /// Whether a range of the name is open.
    pub(super) fn is_open(&self) -> bool {
        self.open > 0
    }
}
