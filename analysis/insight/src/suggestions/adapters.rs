//! All parameters frozen, and small adapters that are trained.

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, WITH_STATE};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::batch::Batches;
use super::recorded::span::Span;
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::Adapters,
    action: "for fine-tuning: freeze the model and give it small adapters (LoRA, peft)",
    condition: "Each step has one backward pass. Parameters, gradients and optimizer state are at least half of the \
                peak, and nearly all gradients are those of linear layers and embeddings.",
    method: "Gradients, optimizer state and the temporaries of the optimizer's step vanish. Activations stay. The \
             adapters themselves, a few hundredths of the parameters, are left out.",
    cost: Cost::OtherTraining,
    code: &[
        "from peft import LoraConfig, get_peft_model",
        r#"model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))"#,
    ],
    link: "https://huggingface.co/docs/peft/task_guides/lora_based_methods",
    at_most: false,
    programs: &["finetune", "tower"],
    find,
};

#[derive(Debug)]
struct Adapters;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let (training, with_parameters) = trained_bytes(&facts.recorded, facts.peak_seq);
    let is_filled = training > 0 && with_parameters >= facts.summed / 2;
    let is_possible =
        is_filled && facts.batches == Batches::One && !facts.is_sharded() && is_adaptable(&facts.recorded);
    if is_possible { Some(Box::new(Adapters)) } else { None }
}

impl Change for Adapters {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Trained
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        freeze(&facts.recorded, &mut blocks.spans);
    }

    fn phases(&self) -> &'static [Phase] {
        WITH_STATE
    }

    fn is_other_training(&self) -> bool {
        true
    }
}

/// Whether the block exists only because parameters are trained: a gradient, optimizer state, or a temporary for them.
fn is_for_training(recorded: &Recorded<'_>, block: &BlockLifetime) -> bool {
    match block.category {
        Category::Gradient => !recorded.is_freed_by_node(block),
        Category::OptimizerState | Category::CommunicationBucket => true,
        Category::Temporary if block.start.phase == Phase::Optimizer => true,
        _ => recorded.is_passing_weight_gradient(block),
    }
}

/// Gradients of other parameters than those of linear layers and embeddings are at most 5 % (1/20) of all, where
/// adapters are computed.
const OTHER_GRADIENTS: u64 = 20;
/// The nodes that compute gradients of linear layers and embeddings.
const ADAPTABLE: &[&str] = &["AddmmBackward", "MmBackward", "LinearBackward", "EmbeddingBackward"];

/// Whether nearly all gradients are those of linear layers and embeddings. With adapters beside all linear layers, the
/// backward pass needs the same activations. Where other layers hold the parameters, it needs fewer.
fn is_adaptable(recorded: &Recorded<'_>) -> bool {
    let (mut adaptable, mut all) = (0, 0);
    for block in recorded.blocks.iter().filter(|block| block.start.phase == Phase::Backward) {
        if block.category == Category::Gradient || recorded.is_passing_weight_gradient(block) {
            let node = recorded.definitions.contexts.get(block.start.context.index()).map_or("", |node| &*node.node);
            all += block.size();
            adaptable += if ADAPTABLE.iter().any(|known| node.starts_with(known)) { block.size() } else { 0 };
        }
    }
    all - adaptable <= all / OTHER_GRADIENTS
}

/// Leaves out what the training of parameters needs.
fn freeze(recorded: &Recorded<'_>, spans: &mut [Span]) {
    for span in spans.iter_mut() {
        if is_for_training(recorded, &recorded.blocks[span.block as usize]) {
            span.vanish();
        }
    }
}

/// The bytes that the training of parameters needs at the event `seq`, and those with the parameters.
fn trained_bytes(recorded: &Recorded<'_>, seq: u32) -> (u64, u64) {
    let at_peak = || recorded.blocks.iter().filter(|block| block.includes(seq));
    let training = at_peak().filter(|block| is_for_training(recorded, block)).map(|block| block.size()).sum();
    let parameters = at_peak().filter(|block| block.category == Category::Parameter).map(|block| block.size());
    (training, training + parameters.sum::<u64>())
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::suggestions::test_program::one_step;

    #[test]
    fn frozen_parameters_have_neither_gradients_nor_state() {
        let mut program = one_step();
        program.alloc(80, Phase::Optimizer, Category::OptimizerState, ContextId::NONE);
        assert_eq!(program.peak(), 40 + 100 + 40);
        assert_eq!(program.peak_with(|_| Some(Box::new(Adapters))), 40 + 100);
    }
}
