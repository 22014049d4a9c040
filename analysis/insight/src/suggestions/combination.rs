//! Changes that are made together.

use super::change::{Assumed, Change, ChangedBlocks, Cost, SuggestionRule};
use super::facts::Facts;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

/// Several changes.
pub static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::CombinedChanges,
    action: "several of these changes together",
    condition: "Together they lower the peak by at least a tenth more than the best of them alone.",
    method: "The changes are replayed together.",
    cost: Cost::Free,
    code: &[],
    link: "",
    at_most: false,
    programs: &["decoder", "unet"],
    find: |_| None,
};

/// One change, or several that are made together, in the order of the list of suggestions.
#[derive(Clone, Debug)]
pub struct Combination<'c> {
    changes: Vec<&'c dyn Change>,
}

impl<'c> Combination<'c> {
    /// A change alone.
    pub fn of(change: &'c dyn Change) -> Combination<'c> {
        Combination { changes: vec![change] }
    }

    /// These changes and another one; `None` if it conflicts with one of them.
    pub fn with(&self, other: &'c dyn Change) -> Option<Combination<'c>> {
        if self.changes.iter().any(|change| conflict(*change, other)) {
            return None;
        }
        let mut changes = self.changes.clone();
        changes.push(other);
        changes.sort_by_key(|change| change.rule().id);
        Some(Combination { changes })
    }

    /// The changes.
    pub fn changes(&self) -> &[&'c dyn Change] {
        &self.changes
    }

    /// The rules of the changes.
    pub fn rules(&self) -> impl Iterator<Item = &'static SuggestionRule> {
        self.changes.iter().map(|change| change.rule())
    }

    /// The recorded blocks with the changes.
    pub(super) fn apply(&self, facts: &Facts<'_>, assumed: Assumed) -> ChangedBlocks {
        let mut in_order = self.changes.clone();
        in_order.sort_by_key(|change| change.order());
        let mut blocks = ChangedBlocks::new(facts, assumed);
        in_order.iter().for_each(|change| change.apply(facts, &mut blocks));
        blocks
    }

    /// Whether one of the changes can lower the peak of this phase.
    pub(super) fn changes_phase(&self, phase: Phase) -> bool {
        self.changes.iter().any(|change| change.phases().contains(&phase))
    }

    /// Whether the recording leaves open what one of the changes does.
    pub(super) fn has_assumptions(&self) -> bool {
        self.changes.iter().any(|change| change.has_assumptions())
    }
}

/// Whether two changes exclude each other. A change excludes itself.
fn conflict(a: &dyn Change, b: &dyn Change) -> bool {
    let (rule_a, rule_b) = (a.rule().id, b.rule().id);
    rule_a == rule_b
        || a.conflicts_with(rule_b)
        || b.conflicts_with(rule_a)
        || a.is_other_training() != b.is_other_training()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suggestions::fused_step::FusedStep;
    use crate::suggestions::optimizer_in_backward::OptimizerInBackward;
    use crate::suggestions::smaller_batches::SmallerBatches;

    #[test]
    fn changes_of_the_same_thing_are_not_combined() {
        let fused = Combination::of(&FusedStep);
        assert!(fused.with(&OptimizerInBackward).is_none());
        assert!(fused.with(&FusedStep).is_none());
        let smaller = SmallerBatches::default();
        let half = Combination::of(&smaller);
        assert!(half.with(&OptimizerInBackward).is_none(), "gradients must stay until the last half");
        let ids: Vec<RuleId> = fused.with(&smaller).expect("both").rules().map(|rule| rule.id).collect();
        assert_eq!(ids, [RuleId::SmallerBatches, RuleId::FusedStep], "the order of the list");
    }
}
