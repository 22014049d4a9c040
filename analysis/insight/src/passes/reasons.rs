//! Counts how often each rule decided a phase, for how many bytes, and on what evidence. Every verdict keeps its rule.

use memtrace_trace::ids::FrameId;

use super::phase::{Phase, Verdict};

/// What one rule decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reason {
    /// The name of the rule.
    pub rule: &'static str,
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
pub struct Reasons {
    rules: Vec<Reason>,
    latest: usize,
}

impl Reasons {
    /// Counts one classified allocation of `bytes` bytes.
    #[inline]
    pub fn add(&mut self, verdict: &Verdict, bytes: u64) {
        // The name is compared by address, which is cheap. A literal can have several addresses; that only adds an
        // entry, and `all` merges entries.
        let is = |r: &Reason| std::ptr::eq(r.rule, verdict.rule) && r.phase == verdict.phase;
        // The rule that decided last usually decides again.
        if !self.rules.get(self.latest).is_some_and(is) {
            self.latest = self.rules.iter().position(is).unwrap_or_else(|| {
                let Verdict { rule, phase, evidence, .. } = *verdict;
                self.rules.push(Reason { rule, phase, evidence, allocations: 0, bytes: 0 });
                self.rules.len() - 1
            });
        }
        let reason = &mut self.rules[self.latest];
        reason.allocations += 1;
        reason.bytes += bytes;
    }

    /// Every rule that decided, by bytes in descending order. Entries with the same name and phase are merged.
    pub fn all(&self) -> Vec<Reason> {
        let mut all: Vec<Reason> = Vec::new();
        for reason in &self.rules {
            match all.iter_mut().find(|r| r.rule == reason.rule && r.phase == reason.phase) {
                Some(same) => {
                    same.allocations += reason.allocations;
                    same.bytes += reason.bytes;
                }
                None => all.push(*reason),
            }
        }
        all.sort_by_key(|r| std::cmp::Reverse(r.bytes));
        all
    }
}
