//! Ranges that the program names (`record_function`, NVTX): a label for each name, an event for each start and end.
//!
//! A program may create names without end (`batch 17`). So a process has at most [`MOST`] labels. After that, names
//! that differ only in a trailing number share a label (`batch #*`), of which there are at most [`MOST_SHARED`]. A name
//! without a label is counted.

use std::borrow::Cow;

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, LabelOrigin};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::StackId;

use crate::guard::Guard;
use crate::stack::{TextId, Texts};

/// At most this many names have a label of their own.
const MOST: u32 = 1 << 16;
/// At most this many labels stand for several names.
const MOST_SHARED: u32 = 1 << 12;
/// The longest name in bytes. A longer name is cut, and the cut is counted.
pub(crate) const LONGEST: usize = 1024;

/// The labels of a process.
pub(crate) struct Labels {
    own: Texts,
    shared: Texts,
}

/// Identifies the range that ends, if its name does not.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Mark {
    /// NVTX's domain. Ranges nest within a domain. 0 is the default domain.
    pub(crate) domain: u32,
    /// The number of a range that does not nest, 0 for ranges that do.
    pub(crate) number: u64,
}

/// Further facts about the start or end of a range.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Moment {
    /// The Python stack.
    pub(crate) stack: StackId,
    /// The state of PyTorch.
    pub(crate) flags: Flags,
}

impl Labels {
    pub(crate) const fn new() -> Labels {
        Labels { own: Texts::new(MOST), shared: Texts::new(MOST_SHARED) }
    }
}

/// Records that a range of this name starts or ends.
pub(crate) fn range(guard: &mut Guard, action: Action, origin: LabelOrigin, text: &[u8], mark: Mark, moment: Moment) {
    match String::from_utf8_lossy(text) {
        Cow::Borrowed(text) => named(guard, action, origin, text, mark, moment),
        // The text is not UTF-8, or [`LONGEST`] has cut a character.
        Cow::Owned(text) => named(guard, action, origin, &text, mark, moment),
    }
}

/// Records the end of a range: the one with the mark's number, otherwise the innermost one of this thread and domain.
/// The reader of the trace finds its name.
pub(crate) fn end(guard: &mut Guard, mark: Mark, moment: Moment) {
    emit(guard, Action::RangeEnd, 0, mark, moment);
}

fn named(guard: &mut Guard, action: Action, origin: LabelOrigin, text: &str, mark: Mark, moment: Moment) {
    let labels = &guard.process().labels;
    let (id, new) = match labels.own.id(origin as u8, text) {
        TextId::Known(id) => (id, None),
        TextId::New(id) => (id, Some(Cow::Borrowed(text))),
        TextId::Full => {
            let kin = kin(text);
            match labels.shared.id(origin as u8, &kin) {
                TextId::Known(id) => (MOST + id, None),
                TextId::New(id) => (MOST + id, Some(Cow::Owned(kin))),
                TextId::Full => {
                    guard.process().count(Counter::LabelsDropped, 1);
                    return;
                }
            }
        }
    };
    if let Some(text) = new {
        guard.define(&Definition::Label { id, origin, text: &text });
    }
    emit(guard, action, id, mark, moment);
}

fn emit(guard: &mut Guard, action: Action, label: u32, mark: Mark, moment: Moment) {
    guard.emit(Event {
        source: Source::Label,
        action,
        addr: label.into(),
        size: mark.number,
        stream: mark.domain.into(),
        stack: moment.stack,
        flags: moment.flags,
        ..Event::EMPTY
    });
}

/// The name without its trailing number, followed by `*`.
fn kin(text: &str) -> String {
    format!("{}*", text.trim_end_matches(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_in_their_last_number_are_kin() {
        assert_eq!(kin("ProfilerStep#17"), "ProfilerStep#*");
        assert_eq!(kin("batch 3"), "batch *");
        assert_eq!(kin("forward"), "forward*");
    }
}
