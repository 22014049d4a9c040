//! The functions with which a program names a range: `gpu_memtrace.annotate` calls them.

use std::ffi::c_char;

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::event::Action;

use super::guard::Guard;
use super::labels::{self, MAX_NAME_BYTES, RangeDetails, RangeKey};
use super::paused::is_paused;

/// Starts a range of this name. Returns its number for [`memtrace_annotation_end`]; 0 if the process is not recorded
/// now.
///
/// The range may end on another thread, and ranges need not nest.
///
/// # Safety
///
/// `name` is null or a C string in UTF-8.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn memtrace_annotation_start(name: *const c_char) -> u64 {
    if name.is_null() || is_paused() {
        return 0;
    }
    // SAFETY: the caller guarantees a C string. `strnlen` reads at most `MAX_NAME_BYTES + 1` bytes and not beyond its
    // end.
    let name = unsafe { std::slice::from_raw_parts(name.cast::<u8>(), libc::strnlen(name, MAX_NAME_BYTES + 1)) };
    let Some(mut guard) = Guard::enter() else { return 0 };
    let recorded = name.get(..MAX_NAME_BYTES).unwrap_or(name);
    if recorded.len() < name.len() {
        guard.process().count(Counter::StringsTruncated, 1);
    }
    let number = labels::next_range_number();
    let key = RangeKey { number, ..RangeKey::default() };
    let details = RangeDetails::default();
    labels::record_range(&mut guard, Action::RangeStart, LabelOrigin::Annotation, recorded, key, details);
    number
}

/// Ends the range that [`memtrace_annotation_start`] has numbered so. 0 has no effect.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn memtrace_annotation_end(number: u64) {
    if number != 0
        && let Some(mut guard) = Guard::enter()
    {
        labels::record_end(&mut guard, RangeKey { number, ..RangeKey::default() }, RangeDetails::default());
    }
}
