//! A step of the optimizer that processes one parameter after the other, where it cannot be fused.

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value, WITH_STATE};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::optimizer_step::{are_all, can_fuse, in_step};
use super::recorded::span::Span;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

/// Optimizers of PyTorch that take `foreach` (their signatures in `torch/optim`). LBFGS, SparseAdam and Muon do not.
const FOREACH: [&str; 12] = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
];
/// The temporaries for one parameter.
const TEMPORARIES: u64 = 3;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::SingleTensorStep,
    action: "foreach=False for {optimizer}: one parameter after the other",
    condition: "The optimizer's step allocates temporaries, and PyTorch's class takes `foreach` and has no fused \
                variant.",
    method: "Three temporaries of the largest parameter's size remain in each step.",
    cost: Cost::MoreKernels,
    code: &["optimizer = torch.optim.{optimizer}(model.parameters(), lr=lr, foreach=False)"],
    link: "https://docs.pytorch.org/docs/stable/optim.html",
    at_most: true,
    programs: &["factored"],
    find,
};

#[derive(Debug)]
struct SingleTensorStep;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let (optimizer, name) = (facts.optimizer?, facts.optimizer_name()?);
    // The class of the rule itself has `foreach=False`.
    let is_own_class = are_all(&name, &[optimizer.name]) && are_all(&name, &FOREACH);
    if is_own_class && !can_fuse(&name) { Some(Box::new(SingleTensorStep)) } else { None }
}

impl Change for SingleTensorStep {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::OptimizerStep
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        one_by_one(&facts.recorded, TEMPORARIES, &mut blocks.spans);
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        other == RuleId::FusedStep
    }

    fn phases(&self) -> &'static [Phase] {
        WITH_STATE
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        vec![("optimizer", Value::Text(facts.optimizer_text()))]
    }
}

/// Processes one parameter after the other: `per_parameter` temporaries of the largest parameter at a time.
fn one_by_one(recorded: &Recorded<'_>, per_parameter: u64, spans: &mut Vec<Span>) {
    let mut steps: Vec<(u32, Span)> = Vec::new();
    for span in spans.iter_mut() {
        let block = &recorded.blocks[span.block as usize];
        if !span.exists() || !in_step(recorded, block) {
            continue;
        }
        match steps.last_mut() {
            Some((step, all)) if *step == block.start.step => {
                all.requested = all.requested.max(span.requested);
                all.end = all.end.max(span.end);
            }
            _ => steps.push((block.start.step, *span)),
        }
        span.vanish();
    }
    for (_, largest) in steps {
        spans.extend((0..per_parameter).map(|_| largest));
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::passes::category::Category;
    use crate::suggestions::test_program::{STEP, one_step};

    #[test]
    fn temporaries_of_one_parameter_remain() {
        let mut program = one_step();
        for mib in [100, 80, 100, 80] {
            let temporary = program.alloc(mib, Phase::Optimizer, Category::Temporary, ContextId::NONE);
            program.blocks[temporary].start.stack = STEP;
        }
        assert_eq!(program.peak(), 40 + 1 + 360);
        assert_eq!(program.peak_with(|_| Some(Box::new(SingleTensorStep))), 40 + 1 + 300);
    }
}
