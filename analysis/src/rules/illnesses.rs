//! What can be wrong with a run's use of memory: one rule for each illness.
//!
//! A rule is what a report cites and what docs/diagnosis.md explains; how evidence adds up to it is a pass's business.

/// One illness.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IllnessRule {
    /// Its name in reports, stable: `leak`, `gradients between steps`.
    pub name: &'static str,
    /// What the verdict rests on.
    pub rests_on: &'static str,
    /// What it cannot see, or may mistake.
    pub blind_to: &'static str,
}
