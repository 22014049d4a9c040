//! An issue of a run: what it is, how large it is, the evidence, and the fix. Everything in it is measured or computed
//! from the run.

use memtrace_trace::ids::{ContextId, StackId};

use super::rule::DiagnosticRule;
use super::turns::LoopTurn;
use crate::rules::RuleId;
use crate::units::size_text;

/// A forecast of more turns than this is of no use.
pub(super) const LONGEST_FORECAST: u64 = 100_000_000;

/// One issue.
#[derive(Clone, PartialEq, Debug)]
pub struct Issue {
    /// The rule that detected it.
    pub rule: &'static DiagnosticRule,
    /// The device ordinal; -1 for the CPU.
    pub device: i16,
    /// The cost in bytes: bytes held needlessly, at the maximum or at the end, as the headline states.
    pub bytes: u64,
    /// The issue in one line, with figures but without the place, which the report appends.
    pub headline: String,
    /// Measured facts, one per line.
    pub evidence: Vec<String>,
    /// The line to change, or the source of the allocations: a stack and an autograd node.
    pub place: Option<(StackId, ContextId)>,
    /// The sources of the blocks that it is about. Empty if they are those of `place`.
    pub sites: Vec<(StackId, ContextId)>,
    /// The fix, in terms of the program's code.
    pub fix: String,
    /// Bytes by which the fix would lower the peak; `None` if this run does not show it.
    pub saves: Option<u64>,
    /// The suggestion of the same change, whose replay shows what the fix saves.
    pub suggestion: Option<RuleId>,
    /// When the device's memory would be full. `None` if nothing grows, or the device's memory is unknown.
    pub forecast: Option<OomForecast>,
    /// Files in the run's folder that show more, most informative first.
    pub files: Vec<String>,
}

/// When a device's memory would be full at the rate at which it filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OomForecast {
    /// The kind of turn of the program's loop.
    pub turn: LoopTurn,
    /// The number of turns until no memory is left.
    pub turns: u64,
    /// The device memory that was free at the peaks of the last turns, in bytes.
    pub free: u64,
    /// The growth per turn in bytes.
    pub growth: u64,
    /// The duration of these turns in clock ticks; 0 if it is unknown.
    pub ticks: u64,
}

impl OomForecast {
    /// The forecast as evidence.
    pub(super) fn evidence(&self) -> String {
        let turn = self.turn.name();
        format!(
            "{} are free at the peak of the last {turn}s, and each {turn} needs {} more",
            size_text(self.free),
            size_text(self.growth)
        )
    }
}

/// Sorts by bytes in descending order. The order of equal issues does not depend on how they were found.
pub fn sort_issues(issues: &mut [Issue]) {
    issues.sort_by(|a, b| {
        let key = |issue: &Issue| (std::cmp::Reverse(issue.bytes), issue.rule.id.as_str(), issue.device, issue.place);
        key(a).cmp(&key(b)).then_with(|| a.headline.cmp(&b.headline))
    });
}
