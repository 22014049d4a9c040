//! Numbers for people, as the reports write them.

pub(super) use memtrace_analysis::report::{count_text, size_text as bytes};

/// `1 event`, `1,234 events`.
pub(super) fn count(number: u64, one: &str) -> String {
    format!("{} {one}{}", count_text(number), if number == 1 { "" } else { "s" })
}
