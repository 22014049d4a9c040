//! Names that the program gives to ranges of its work (`record_function`, NVTX): a label for each text, an event for each end of a range.
//!
//! A program may make names without end (`batch 17`). So there are at most [`MOST`] labels in a process; beyond that a name that
//! ends in a number shares one with its kin (`batch #*`), and what finds no room even so is counted.

use std::borrow::Cow;

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, LabelOrigin};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::StackId;

use crate::guard::Guard;
use crate::stack::{TextId, Texts};

/// Labels of their own.
const MOST: u32 = 1 << 16;
/// Labels beyond those that stand for many names.
const MOST_SHARED: u32 = 1 << 12;
/// The longest name, in bytes. What is longer is cut, and counted.
pub(crate) const LONGEST: usize = 1024;

/// The labels of a process.
pub(crate) struct Labels {
    own: Texts,
    shared: Texts,
}

/// Which range ends, where the name does not say it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Mark {
    /// NVTX's domain: ranges nest within each; 0 is the default one.
    pub(crate) domain: u32,
    /// The number of a range that does not nest; 0 for those that do.
    pub(crate) number: u64,
}

/// What else is told of a range's beginning or end.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Moment {
    /// The Python stack.
    pub(crate) stack: StackId,
    /// What PyTorch is doing.
    pub(crate) flags: Flags,
}

impl Labels {
    pub(crate) const fn new() -> Labels {
        Labels { own: Texts::new(MOST), shared: Texts::new(MOST_SHARED) }
    }
}

/// A range of this name begins or ends.
pub(crate) fn range(guard: &mut Guard, action: Action, origin: LabelOrigin, text: &[u8], mark: Mark, moment: Moment) {
    match String::from_utf8_lossy(text) {
        Cow::Borrowed(text) => named(guard, action, origin, text, mark, moment),
        // A character that the limit has cut, or another encoding than UTF-8.
        Cow::Owned(text) => named(guard, action, origin, &text, mark, moment),
    }
}

/// The innermost range of this thread and domain, or the one of this number, ends: the reader knows its name.
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

/// A name without the number that it ends in.
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
