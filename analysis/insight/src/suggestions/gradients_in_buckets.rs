//! Gradients that are views of DistributedDataParallel's buckets.

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, WITH_STATE};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::batch::passing_end;
use super::recorded::span::Span;
use crate::passes::category::Category;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::GradientsInBuckets,
    action: "gradient_as_bucket_view=True for DistributedDataParallel",
    condition: "DistributedDataParallel is called, and buckets are allocated.",
    method: "Gradients are views of the buckets.",
    cost: Cost::Free,
    code: &["model = DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True)"],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
    at_most: false,
    programs: &["ddp"],
    find,
};

#[derive(Debug)]
struct GradientsInBuckets;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let mut calls = facts.recorded.definitions.nn_calls.values();
    let has_buckets = facts.recorded.blocks.iter().any(|block| block.category == Category::CommunicationBucket);
    let is_possible = has_buckets && calls.any(|call| &*call.class == "DistributedDataParallel");
    if is_possible { Some(Box::new(GradientsInBuckets)) } else { None }
}

impl Change for GradientsInBuckets {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Buckets
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        gradients_in_buckets(&facts.recorded, &mut blocks.spans);
    }

    fn phases(&self) -> &'static [Phase] {
        WITH_STATE
    }
}

/// Makes gradients views of DistributedDataParallel's buckets. A node still allocates a gradient, which is then copied
/// into the bucket. Gradients that no node allocates are views already.
fn gradients_in_buckets(recorded: &Recorded<'_>, spans: &mut [Span]) {
    for span in spans.iter_mut() {
        let block = &recorded.blocks[span.block as usize];
        if block.category == Category::Gradient && recorded.contexts().is_node(block.start.context) {
            span.end_by(passing_end(recorded, block).max(span.start + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::suggestions::test_program::{FIRST, NODE_OF_FIRST, NODE_OF_SECOND, Program};

    #[test]
    fn each_gradient_is_freed_when_it_is_in_its_bucket() {
        let mut program = Program::default();
        program.alloc(40, Phase::Load, Category::CommunicationBucket, ContextId::NONE);
        let saved = program.activation(100, FIRST);
        program.passes = 1;
        for node in [NODE_OF_SECOND, NODE_OF_FIRST] {
            program.alloc(20, Phase::Backward, Category::Gradient, node);
        }
        program.free(saved, NODE_OF_FIRST);
        assert_eq!(program.peak(), 40 + 100 + 40);
        assert_eq!(program.peak_with(|_| Some(Box::new(GradientsInBuckets))), 40 + 100 + 20);
    }
}
