//! Ranges that the program names (`record_function`, NVTX, `annotate`): a label for each name, an event for each start
//! and end. A name without a label is counted.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, LabelOrigin};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::StackId;

use super::guard::Guard;
use super::label_ids::Label;

/// The longest name in bytes. A longer name is cut, and the cut is counted.
pub(crate) const MAX_NAME_BYTES: usize = 1024;

/// Identifies the range that ends, if its name does not.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct RangeKey {
    /// NVTX's domain. Ranges nest within a domain. 0 is the default domain.
    pub(crate) domain: u32,
    /// The number of a range that does not nest, 0 for ranges that do.
    pub(crate) number: u64,
}

/// How many ranges that do not nest have a number.
static LAST_RANGE_NUMBER: AtomicU64 = AtomicU64::new(0);

/// A number for a range that does not nest. No other range of the process has it.
pub(crate) fn next_range_number() -> u64 {
    LAST_RANGE_NUMBER.fetch_add(1, Ordering::Relaxed) + 1
}

/// Further facts about the start or end of a range.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct RangeDetails {
    /// The Python stack.
    pub(crate) stack: StackId,
    /// The state of PyTorch.
    pub(crate) flags: Flags,
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

/// Records the end of a range: the one with the key's number, otherwise the innermost one of this thread and domain.
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
    let Some(Label { id, new }) = guard.process().labels.label(origin, text) else {
        return guard.process().count(Counter::LabelsDropped, 1);
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
