//! Counts how often each rule decided a phase, for how many bytes, and on what evidence.

use memtrace_trace::ids::FrameId;

use super::phase::{EventClassification, Phase};
use crate::rules::PhaseRuleId;

/// The decisions of one rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PhaseRuleUse {
    /// The rule.
    pub rule: PhaseRuleId,
    /// The phase that it decided.
    pub phase: Phase,
    /// A frame that the rule matched; `NONE` if the rule is not about frames.
    pub evidence: FrameId,
    /// The number of allocations that it decided.
    pub allocations: u64,
    /// The bytes of these allocations.
    pub bytes: u64,
}

/// The counts of all rules.
#[derive(Clone, Debug, Default)]
pub struct PhaseRuleUses {
    uses: Vec<PhaseRuleUse>,
    latest: usize,
}

impl PhaseRuleUses {
    /// Counts one classified allocation of `bytes` bytes.
    #[inline]
    pub fn add(&mut self, classification: &EventClassification, bytes: u64) {
        let EventClassification { rule, phase, evidence, .. } = *classification;
        let is_same = |one: &PhaseRuleUse| one.rule == rule && one.phase == phase;
        // The rule that decided last usually decides again.
        if !self.uses.get(self.latest).is_some_and(is_same) {
            self.latest = self.uses.iter().position(is_same).unwrap_or_else(|| {
                self.uses.push(PhaseRuleUse { rule, phase, evidence, allocations: 0, bytes: 0 });
                self.uses.len() - 1
            });
        }
        let counts = &mut self.uses[self.latest];
        counts.allocations += 1;
        counts.bytes += bytes;
    }

    /// Every rule that decided a phase, by bytes in descending order.
    pub fn all(&self) -> Vec<PhaseRuleUse> {
        let mut all = self.uses.clone();
        all.sort_by_key(|one| std::cmp::Reverse(one.bytes));
        all
    }
}
