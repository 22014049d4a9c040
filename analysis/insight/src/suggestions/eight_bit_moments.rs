//! Optimizer state in 8 bits, as bitsandbytes keeps it.

use memtrace_trace::definition::TensorKind;

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value, WITH_STATE};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::optimizer_step::{are_all, remove_temporaries};
use super::recorded::span::Span;
use crate::passes::category::Category;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

/// Optimizers with a variant that keeps 8-bit state, in bitsandbytes.
const EIGHT_BIT: [&str; 6] = ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Lion"];
/// The state of options that bitsandbytes refuses: Adam and AdamW with amsgrad, RMSprop with centered.
const NOT_IN_EIGHT_BIT: [&str; 2] = ["max_exp_avg_sq", "grad_avg"];
/// State of fewer bytes keeps its data type: bitsandbytes leaves tensors of fewer than 4096 elements alone.
const SMALLEST_EIGHT_BIT: u64 = 4096 * 4;
/// The bytes of float32 state that share one float32 scale in 8-bit state.
const SCALED_TOGETHER: u64 = 256 * 4;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::EightBitMoments,
    action: "8-bit state for {optimizer} (bitsandbytes)",
    condition: "The optimizer keeps float32 state, and bitsandbytes has an 8-bit variant of it with the same options: \
                not for amsgrad or centered.",
    method: "State tensors of at least 4096 values take one byte per value, and four bytes per 256 values. The \
             step needs no temporaries.",
    cost: Cost::EightBit,
    code: &["import bitsandbytes", "optimizer = bitsandbytes.optim.{optimizer}8bit(model.parameters(), lr=lr)"],
    link: "https://huggingface.co/docs/bitsandbytes/optimizers",
    at_most: false,
    programs: &["wide", "vit"],
    find,
};

#[derive(Debug)]
struct EightBitMoments;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let has_variant = are_all(&facts.optimizer_name()?, &EIGHT_BIT) && !facts.has_optimizer_state(&NOT_IN_EIGHT_BIT);
    if has_variant && facts.is_float32(TensorKind::OptimizerState) { Some(Box::new(EightBitMoments)) } else { None }
}

impl Change for EightBitMoments {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::OptimizerStep
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        eight_bit(&facts.recorded, &mut blocks.spans);
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        matches!(other, RuleId::FusedStep | RuleId::SingleTensorStep)
    }

    fn phases(&self) -> &'static [Phase] {
        WITH_STATE
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        vec![("optimizer", Value::Text(facts.optimizer_text()))]
    }
}

/// Keeps state in 8 bits, with a scale for each group of values. Its kernels need no temporaries.
fn eight_bit(recorded: &Recorded<'_>, spans: &mut [Span]) {
    for span in spans.iter_mut() {
        let block = &recorded.blocks[span.block as usize];
        if block.category == Category::OptimizerState && span.requested >= SMALLEST_EIGHT_BIT {
            span.requested = span.requested / 4 + span.requested.div_ceil(SCALED_TOGETHER) * 4;
        }
    }
    remove_temporaries(recorded, spans);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suggestions::test_program::interrupted_optimizer;

    #[test]
    fn state_that_follows_an_error_is_smaller_too() {
        let (program, failed) = interrupted_optimizer();
        let (weights, gradients, moments) = (40, 40, 80);
        let peak = program.with_failure(|_| Some(Box::new(EightBitMoments)), failed);
        assert_eq!(peak, weights + moments * 65 / 256 + 100 + gradients);
    }
}
