//! What a diagnostic rule states about itself.

use crate::rules::RuleId;

/// The rule for one issue. Reports cite its id, and docs/reference/diagnostics.md repeats its texts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiagnosticRule {
    /// The stable id in reports and on the command line.
    pub id: RuleId,
    /// The evidence that the rule requires.
    pub evidence: &'static str,
    /// What the rule cannot detect, or can mistake.
    pub limits: &'static str,
    /// What keeps the tensors that its issues are about.
    pub kept_by: KeptBy,
}

/// What keeps the tensors of an issue. `memtrace --holders` finds the Python objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeptBy {
    /// No object of the program, or the objects do not matter.
    Nothing,
    /// Python objects that the program should release.
    Objects,
    /// Autograd graphs, and Python objects that keep these.
    Graphs,
}
