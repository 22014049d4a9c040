//! How often each rule decided, over how many bytes, and on what evidence: no verdict without its reason.

use memtrace_trace::ids::FrameId;

use super::phase::{Phase, Verdict};

/// One rule's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reason {
    /// The rule.
    pub rule: &'static str,
    /// The phase it gave.
    pub phase: Phase,
    /// A frame it rested on, where it rests on frames.
    pub evidence: FrameId,
    /// Allocations it decided.
    pub allocations: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Reasons {
    rules: Vec<Reason>,
    latest: usize,
}

impl Reasons {
    /// An allocation was judged.
    #[inline]
    pub fn add(&mut self, verdict: &Verdict, bytes: u64) {
        // By address first: one literal may have several, which only costs another entry.
        let is = |r: &Reason| std::ptr::eq(r.rule, verdict.rule) && r.phase == verdict.phase;
        // The rule that decided last mostly decides again.
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

    /// Every rule that decided, most bytes first. Rules of one name are one rule.
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
