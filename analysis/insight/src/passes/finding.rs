//! Something wrong with a run: what, how much, on what evidence, and what mends it.
//!
//! A pass that knows of an illness makes a [`Finding`]; whoever streams collects them in `Story::findings`. The report puts places into
//! words and prints findings, largest first. What a finding says is measured or computed from the run.

use memtrace_trace::ids::{ContextId, StackId};

use crate::rules::IllnessRule;

/// One thing that is wrong.
#[derive(Clone, PartialEq, Debug)]
pub struct Finding {
    /// The rule that says so.
    pub rule: &'static IllnessRule,
    /// On which device; -1 is the CPU.
    pub device: i16,
    /// What it costs: bytes held that need not be, at most or at the end, as the headline says.
    pub bytes: u64,
    /// What is wrong, in one line, figures included, the place not: the report appends it.
    pub headline: String,
    /// What it rests on: measured facts, one line each.
    pub evidence: Vec<String>,
    /// The line to change, or whose allocations these are: a stack and the autograd node.
    pub place: Option<(StackId, ContextId)>,
    /// What to do about it, in the program's terms.
    pub mend: String,
    /// Bytes by which the peak would be lower; `None` where this run does not tell.
    pub saves: Option<u64>,
    /// Files in the run's folder that show more, most telling first.
    pub files: Vec<String>,
}

/// Largest first; the order of equals does not depend on how they were found.
pub fn sort_findings(findings: &mut [Finding]) {
    findings.sort_by(|a, b| {
        let key = |f: &Finding| (std::cmp::Reverse(f.bytes), f.rule.name, f.device, f.place);
        key(a).cmp(&key(b)).then_with(|| a.headline.cmp(&b.headline))
    });
}
