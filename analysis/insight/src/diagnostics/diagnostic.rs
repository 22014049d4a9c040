//! The interface of a diagnostic.

use super::device_facts::{DeviceFacts, SharedFacts};
use super::issue::Issue;
use super::launch::{LaunchIssue, LaunchProcess};
use super::rule::DiagnosticRule;
use crate::passes::pass::Pass;

/// A diagnostic: a pass that collects a signal, its rules, and the issues that it finds in the signal.
///
/// Frees after the last allocation (the teardown at the program's end) do not show what the program would have kept.
pub(crate) trait Diagnostic: Pass {
    /// The rules by which it finds issues. A rule that several diagnostics share belongs to one of them.
    const RULES: &'static [&'static DiagnosticRule];

    /// Adds what other diagnostics need to know. Called before issues are found.
    fn share(&self, _device: &DeviceFacts<'_>, _shared: &mut SharedFacts) {}

    /// Adds the issues of the device. `issues` has those of the diagnostics before this one.
    fn issues(&self, _device: &DeviceFacts<'_>, _shared: &SharedFacts, _issues: &mut Vec<Issue>) {}

    /// The issues that concern several processes.
    fn launch_issues(_processes: &[LaunchProcess<'_>]) -> Vec<LaunchIssue> {
        Vec::new()
    }
}
