//! An issue of a run: what it is, how large it is, the evidence, and the fix.
//!
//! A pass that detects an issue makes a [`Finding`]. The caller that streams collects findings in `Story::findings`.
//! The report turns places into text and prints findings, largest first. Everything in a finding is measured or
//! computed from the run.

use memtrace_trace::ids::{ContextId, StackId};

use crate::rules::IllnessRule;

/// One issue.
#[derive(Clone, PartialEq, Debug)]
pub struct Finding {
    /// The rule that detected it.
    pub rule: &'static IllnessRule,
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
    /// The fix, in terms of the program's code.
    pub mend: String,
    /// Bytes by which the fix would lower the peak; `None` if this run does not show it.
    pub saves: Option<u64>,
    /// Files in the run's folder that show more, most informative first.
    pub files: Vec<String>,
}

/// Sorts by bytes in descending order. The order of equal findings does not depend on how they were found.
pub fn sort_findings(findings: &mut [Finding]) {
    findings.sort_by(|a, b| {
        let key = |f: &Finding| (std::cmp::Reverse(f.bytes), f.rule.name, f.device, f.place);
        key(a).cmp(&key(b)).then_with(|| a.headline.cmp(&b.headline))
    });
}
