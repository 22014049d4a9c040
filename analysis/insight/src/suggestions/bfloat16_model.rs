//! Parameters in bfloat16, and with them gradients and optimizer state.

use memtrace_trace::definition::TensorKind;

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::span::Span;
use crate::passes::category::Category;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

/// It is computed where blocks of unknown data types are at most 5 % (1/20) of the peak.
const SMALL_UNKNOWN: u64 = 20;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::Bfloat16Model,
    action: "parameters in bfloat16, and with them gradients and optimizer state",
    condition: "All parameters are float32. They, gradients, optimizer state and workspaces are all but a \
                twentieth of the peak.",
    method: "Parameters, gradients, optimizer state and the temporaries of the optimizer's step halve.",
    cost: Cost::OtherTraining,
    code: &[
        "model = model.to(torch.bfloat16)  # before the optimizer is made",
        "output = model(inputs.to(torch.bfloat16))  # {call}",
    ],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.to",
    at_most: false,
    programs: &["wide", "tower"],
    find,
};

#[derive(Debug)]
struct Bfloat16Model;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    // The names of tensors show the data types of parameters and of what belongs to them.
    let is_unknown = |category| {
        !matches!(category, Category::Parameter | Category::Gradient | Category::OptimizerState | Category::Workspace)
    };
    let is_possible =
        facts.is_float32(TensorKind::Parameter) && facts.bytes_at_peak(is_unknown) <= facts.peak / SMALL_UNKNOWN;
    if is_possible { Some(Box::new(Bfloat16Model)) } else { None }
}

impl Change for Bfloat16Model {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::ParameterTypes
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        halve_state(&facts.recorded, &mut blocks.spans);
    }

    fn phases(&self) -> &'static [Phase] {
        &[Phase::Load, Phase::Eval, Phase::Generate, Phase::Rollout, Phase::Optimizer]
    }
}

fn halve_state(recorded: &Recorded<'_>, spans: &mut [Span]) {
    for span in spans.iter_mut() {
        let block = &recorded.blocks[span.block as usize];
        let is_state = matches!(block.category, Category::Parameter | Category::Gradient | Category::OptimizerState);
        if is_state || block.category == Category::Temporary && block.start.phase == Phase::Optimizer {
            span.requested = span.requested.div_ceil(2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suggestions::test_program::one_step;

    #[test]
    fn parameters_and_gradients_halve_and_activations_do_not() {
        assert_eq!(one_step().peak_with(|_| Some(Box::new(Bfloat16Model))), 20 + 100 + 20);
    }
}
