//! Ranges that the program names (`record_function`, NVTX): a label for each name, an event for each start and end.
//!
//! A program may create names without end (`batch 17`). So a process has at most [`MAX_LABELS`] labels. After that,
//! names that differ only in a trailing number share a label (`batch #*`), of which there are at most
//! [`MAX_SHARED_LABELS`]. A name without a label is counted.

use std::borrow::Cow;

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, LabelOrigin};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::StackId;

use crate::guard::Guard;
use crate::stack::{TextId, Texts};

/// At most this many names have a label of their own.
const MAX_LABELS: u32 = 1 << 16;
/// At most this many labels stand for several names.
const MAX_SHARED_LABELS: u32 = 1 << 12;
/// The longest name in bytes. A longer name is cut, and the cut is counted.
pub(crate) const MAX_NAME_BYTES: usize = 1024;

/// The labels of a process.
pub(crate) struct Labels {
    individual: Texts,
    shared: Texts,
}

/// Identifies the range that ends, if its name does not.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct RangeKey {
    /// NVTX's domain. Ranges nest within a domain. 0 is the default domain.
    pub(crate) domain: u32,
    /// The number of a range that does not nest, 0 for ranges that do.
    pub(crate) number: u64,
}

/// Further facts about the start or end of a range.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct RangeDetails {
    /// The Python stack.
    pub(crate) stack: StackId,
    /// The state of PyTorch.
    pub(crate) flags: Flags,
}

impl Labels {
    pub(crate) const fn new() -> Labels {
        Labels { individual: Texts::new(MAX_LABELS), shared: Texts::new(MAX_SHARED_LABELS) }
    }
}

/// Records that a range of this name starts or ends.
pub(crate) fn record_range(
    guard: &mut Guard,
    action: Action,
    origin: LabelOrigin,
    text: &[u8],
    key: RangeKey,
    details: RangeDetails,
) {
    match String::from_utf8_lossy(text) {
        Cow::Borrowed(text) => record_named(guard, action, origin, text, key, details),
        // The text is not UTF-8, or [`MAX_NAME_BYTES`] has cut a character.
        Cow::Owned(text) => record_named(guard, action, origin, &text, key, details),
    }
}

/// Records the end of a range: the one with the mark's number, otherwise the innermost one of this thread and domain.
/// The reader of the trace finds its name.
pub(crate) fn record_end(guard: &mut Guard, key: RangeKey, details: RangeDetails) {
    emit(guard, Action::RangeEnd, 0, key, details);
}

fn record_named(
    guard: &mut Guard,
    action: Action,
    origin: LabelOrigin,
    text: &str,
    key: RangeKey,
    details: RangeDetails,
) {
    let labels = &guard.process().labels;
    let (id, new) = match labels.individual.id(origin as u8, text) {
        TextId::Known(id) => (id, None),
        TextId::New(id) => (id, Some(Cow::Borrowed(text))),
        TextId::Full => {
            let name = shared_name(text);
            match labels.shared.id(origin as u8, &name) {
                TextId::Known(id) => (MAX_LABELS + id, None),
                TextId::New(id) => (MAX_LABELS + id, Some(Cow::Owned(name))),
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
    emit(guard, action, id, key, details);
}

fn emit(guard: &mut Guard, action: Action, label: u32, key: RangeKey, details: RangeDetails) {
    guard.emit(Event {
        source: Source::Label,
        action,
        addr: label.into(),
        size: key.number,
        stream: key.domain.into(),
        stack: details.stack,
        flags: details.flags,
        ..Event::EMPTY
    });
}

/// The name without its trailing number, followed by `*`.
fn shared_name(text: &str) -> String {
    format!("{}*", text.trim_end_matches(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_in_their_last_number_share_a_name() {
        assert_eq!(shared_name("ProfilerStep#17"), "ProfilerStep#*");
        assert_eq!(shared_name("batch 3"), "batch *");
        assert_eq!(shared_name("forward"), "forward*");
    }
}
