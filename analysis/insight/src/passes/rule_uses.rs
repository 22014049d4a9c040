//! Which rules decided: about phases, about categories, and about the user's own categories.

use super::category::CategoryRuleUses;
use super::composition::Amount;
use super::pass::{BlockAllocated, LifetimeEnded, Pass};
use super::phase_rule_uses::PhaseRuleUses;

/// The rules that decided about the blocks of a device.
#[derive(Clone, Debug, Default)]
pub struct RuleUses {
    /// Which rules decided phases.
    pub phases: PhaseRuleUses,
    /// Which rules decided categories.
    pub categories: CategoryRuleUses,
    /// By rule of the user's file: what it decided. The last entry is what no rule matches. Empty without a file.
    pub custom: Vec<Amount>,
}

impl Pass for RuleUses {
    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        if !allocated.is_earlier {
            self.phases.add(allocated.classification, allocated.block.memory.size);
        }
    }

    #[inline]
    fn lifetime_ended(&mut self, ended: &LifetimeEnded<'_>) {
        let size = ended.block.memory.size;
        if let Some(custom) = &ended.tracked.custom {
            let rules = custom.rules().rules().len();
            self.custom.resize(rules + 1, Amount::default());
            self.custom[custom.rule_of(ended.block).unwrap_or(rules)].add(size);
        }
        self.categories.add(&ended.classification, size, ended.evidence);
    }
}
