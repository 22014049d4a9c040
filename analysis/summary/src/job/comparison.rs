//! What differs between the peaks of two ranks, by category and line: a replay of these two traces only.

use std::path::Path;

use memtrace_input::error::Result;
use memtrace_input::load::open_run;
use schemars::JsonSchema;
use serde::Serialize;

use crate::compare::diff;
use crate::diff::{CategoryChange, DiffOptions, LineChange};
use crate::progress::Progress;

/// What one rank has more than another at its peak. A difference is the value of `rank` minus the value of `than_rank`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct JobComparison {
    /// The rank.
    pub rank: u32,
    /// The rank with which it is compared: A of the tables.
    pub than_rank: u32,
    /// The difference of the peaks of allocated bytes.
    pub difference_bytes: i64,
    /// The allocated blocks by category. The differences add up to `difference_bytes`.
    pub by_category: Vec<CategoryChange>,
    /// The allocated blocks by line and category, largest growth first. The differences add up to `difference_bytes`.
    pub by_line: Vec<LineChange>,
}

/// A rank, its trace and its device.
pub(super) struct Compared<'a> {
    pub(super) rank: u32,
    pub(super) trace: &'a Path,
    pub(super) device: i16,
}

/// Compares the peaks of two ranks. `None` if one of them has none on its device.
pub(super) fn compare(
    worst: &Compared<'_>,
    median: &Compared<'_>,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Option<JobComparison>> {
    let (a, b) = (open_run(median.trace)?, open_run(worst.trace)?);
    let report = diff(&a, &b, &DiffOptions::default(), progress);
    let is_pair = |a: i16, b: i16| a == median.device && b == worst.device;
    let pair = report.pairs.into_iter().find(|pair| is_pair(pair.a.device, pair.b.device));
    Ok(pair.map(|pair| JobComparison {
        rank: worst.rank,
        than_rank: median.rank,
        difference_bytes: pair.difference_bytes,
        by_category: pair.by_category,
        by_line: pair.by_line,
    }))
}
