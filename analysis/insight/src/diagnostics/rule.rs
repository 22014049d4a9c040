//! A diagnostic rule: its texts and properties.

use crate::rules::RuleId;

/// The rule for one issue. Reports cite its id, docs/reference/diagnostics.md repeats its texts, and
/// `memtrace explain` adds the code to them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiagnosticRule {
    /// The stable id in reports and on the command line.
    pub id: RuleId,
    /// The issue in one sentence.
    pub meaning: &'static str,
    /// The evidence that the rule requires.
    pub evidence: &'static str,
    /// The cases that the rule cannot detect, or can mistake.
    pub limits: &'static str,
    /// Lines that show the usual fix. The issue has the fix for its case.
    pub code: &'static [&'static str],
    /// A page about it.
    pub link: &'static str,
    /// The objects that keep the tensors of its issues.
    pub kept_by: KeptBy,
}

/// The objects that keep the tensors of an issue. `memtrace --holders` finds the Python objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeptBy {
    /// No object of the program, or the objects do not matter.
    Nothing,
    /// Python objects that the program should release.
    Objects,
    /// Autograd graphs, and Python objects that keep these.
    Graphs,
}
