//! Formats numbers for people in the same way as the reports.

pub(super) use memtrace_analysis::report::{count_text, size_text as bytes};

/// A count with its noun, such as `1 event` or `1,234 events`.
pub(super) fn count(number: u64, one: &str) -> String {
    format!("{} {one}{}", count_text(number), if number == 1 { "" } else { "s" })
}
