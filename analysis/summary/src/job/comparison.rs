//! The difference between the peaks of two ranks, by category and line: a replay of these two traces only.

use std::path::Path;

use memtrace_input::error::Result;
use memtrace_input::load::open_run;

use crate::compare::diff_processes;
use crate::progress::Progress;
use crate::rank_table::RankComparison;

/// A rank, its trace and its device.
pub(super) struct Compared<'a> {
    pub(super) rank: u32,
    pub(super) trace: &'a Path,
    pub(super) device: i16,
}

/// Compares the peaks of two ranks. `None` if one of them has none on its device.
///
/// # Errors
///
/// If a trace cannot be read.
pub(super) fn compare(
    median: &Compared<'_>,
    worst: &Compared<'_>,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Option<RankComparison>> {
    let (a, b) = (open_run(median.trace)?, open_run(worst.trace)?);
    let (Some(of_a), Some(of_b)) = (a.processes().first(), b.processes().first()) else { return Ok(None) };
    let pair = diff_processes([(&a, of_a, median.device), (&b, of_b, worst.device)], progress);
    Ok(pair.map(|mut pair| {
        // A trace alone can lack the variables that its manifest has.
        (pair.a.rank, pair.b.rank) = (Some(median.rank), Some(worst.rank));
        RankComparison::of(pair)
    }))
}
