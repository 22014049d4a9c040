//! Lists of names in the notices of a job.

use memtrace_insight::units::count_text;

/// The number of names in a notice.
const NAMES: usize = 3;

/// The first names, and the number of the others.
pub(super) fn names(all: &[&str]) -> String {
    let more = all.len().saturating_sub(NAMES);
    let more = if more > 0 { format!(" and {} more", count_text(more as u64)) } else { String::new() };
    format!("{}{more}", all.iter().take(NAMES).copied().collect::<Vec<_>>().join(", "))
}
