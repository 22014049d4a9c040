//! Counts how many blocks and bytes each category rule decided, and on what evidence.

use memtrace_trace::ids::FrameId;

use super::block::BlockClassification;

/// How often one rule decided a category.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CategoryRuleUse {
    /// The category and its rule.
    pub classification: BlockClassification,
    /// A frame that the rule matched; `NONE` if the rule is not about frames.
    pub evidence: FrameId,
    /// The number of blocks that the rule decided.
    pub blocks: u64,
    /// The sum of their sizes in bytes.
    pub bytes: u64,
}

/// For each rule: how many blocks and bytes it decided.
#[derive(Clone, Debug, Default)]
pub struct CategoryRuleUses {
    uses: Vec<CategoryRuleUse>,
    latest: usize,
}

impl CategoryRuleUses {
    /// Counts one classified block of `bytes` bytes. `evidence` is a frame that the rule matched.
    #[inline]
    pub fn add(&mut self, classification: &BlockClassification, bytes: u64, evidence: FrameId) {
        let classification = *classification;
        let is_same = |one: &CategoryRuleUse| one.classification == classification;
        // The rule that decided last usually decides again.
        if !self.uses.get(self.latest).is_some_and(is_same) {
            self.latest = self.uses.iter().position(is_same).unwrap_or_else(|| {
                self.uses.push(CategoryRuleUse { classification, evidence, blocks: 0, bytes: 0 });
                self.uses.len() - 1
            });
        }
        if let Some(counts) = self.uses.get_mut(self.latest) {
            counts.blocks += 1;
            counts.bytes += bytes;
        }
    }

    /// Every rule that decided a block, by bytes in descending order.
    pub fn all(&self) -> Vec<CategoryRuleUse> {
        let mut all = self.uses.clone();
        all.sort_by_key(|one| std::cmp::Reverse(one.bytes));
        all
    }
}
