//! Page-locked host memory by line, and how much of it PyTorch's rounding can be.
//!
//! PyTorch's host allocator rounds each request up to a power of two (`CachingHostAllocator.h`), so a block of such a
//! size was requested with more than half of it. Nothing that is recorded has the requested size.

use memtrace_insight::locations::Locations;
use memtrace_insight::passes::Analysis;
use memtrace_insight::rules::PYTORCH;
use memtrace_insight::units::{count_text, size_text};
use memtrace_replay::PinnedBlocks;
use memtrace_trace::ids::ContextId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::owners::owner_name;

/// The rounding that a line must be able to have to be shown in reports, in bytes.
const MIN_ROUNDING: u64 = 16 << 20;
/// The maximum number of lines.
const MAX_LINES: usize = 20;

/// The pinned host memory of one line.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PinnedLine {
    /// The line.
    pub location: String,
    /// The library that allocated the memory.
    pub owner: String,
    /// The bytes at the peak of all pinned host memory.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The program requested more than this from PyTorch, which rounds each request up to a power of two. The requested
    /// bytes are not recorded. Absent if no block can be rounded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requested_over_bytes: Option<u64>,
    /// The line as text, if PyTorch's rounding can be large. Absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

impl PinnedLine {
    fn with_text(self) -> PinnedLine {
        PinnedLine { text: self.rounding_text(), ..self }
    }

    fn rounding_text(&self) -> Option<String> {
        let over = self.requested_over_bytes.filter(|over| self.bytes - over >= MIN_ROUNDING)?;
        let blocks = if self.blocks == 1 { String::new() } else { format!(" in {} blocks", count_text(self.blocks)) };
        Some(format!(
            "{}{blocks} at {} for requests of more than {}: PyTorch rounds up to powers of two, and requested sizes \
             are not recorded",
            size_text(self.bytes),
            self.location,
            size_text(over)
        ))
    }
}

/// The lines at the peak, most bytes first.
pub(crate) fn pinned_lines(analysis: &Analysis, locations: &Locations<'_>) -> Vec<PinnedLine> {
    let mut lines: Vec<(PinnedLine, PinnedBlocks)> = Vec::new();
    for ((owner, stack), blocks) in &analysis.pinned {
        let owner = owner_name(*owner, locations.definitions());
        let location = locations.stack(*stack, ContextId::NONE).location;
        match lines.iter_mut().find(|(line, _)| line.location == location && line.owner == owner) {
            Some((_, sum)) => sum.add(blocks),
            None => lines.push((PinnedLine { location, owner: owner.to_owned(), ..PinnedLine::default() }, *blocks)),
        }
    }
    lines.sort_by(|(a, x), (b, y)| y.bytes.cmp(&x.bytes).then_with(|| a.location.cmp(&b.location)));
    lines.truncate(MAX_LINES);
    let with_sums = |(line, sum): (PinnedLine, PinnedBlocks)| {
        let is_rounded = line.owner == PYTORCH && sum.powers_of_two > 0;
        let requested_over_bytes = is_rounded.then(|| sum.bytes - sum.powers_of_two / 2);
        PinnedLine { bytes: sum.bytes, blocks: sum.blocks, requested_over_bytes, ..line }.with_text()
    };
    lines.into_iter().map(with_sums).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_large_rounding_is_shown() {
        let line = PinnedLine { location: "train.py:3".to_owned(), bytes: 192 << 20, blocks: 3, ..Default::default() };
        let with = |over| PinnedLine { requested_over_bytes: over, ..line.clone() }.with_text().text;
        assert_eq!(
            with(Some(96 << 20)).as_deref(),
            Some(
                "192 MiB in 3 blocks at train.py:3 for requests of more than 96.0 MiB: PyTorch rounds up to powers of \
                 two, and requested sizes are not recorded"
            )
        );
        assert_eq!(with(None), None);
        assert_eq!(with(Some(180 << 20)), None);
    }
}
