//! Parameters that the module's own conversion (`.half()`, `.to(dtype)`) replaces by smaller ones. Made in the final
//! data type, they are small from the start.

use memtrace_trace::ids::StackId;

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::{BlockEvent, Recorded};
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::FinalDataType,
    action: "make the parameters in the data type to which {place} converts them: dtype= of from_pretrained(), or \
             torch.set_default_dtype() before the model is built",
    condition: "The peak is in loading, and a conversion of the model replaces parameters by smaller ones.",
    method: "The smaller parameters exist from the start. Those that they replace vanish.",
    cost: Cost::Free,
    code: &[
        "torch.set_default_dtype(torch.bfloat16)  # before the model is built",
        "model = Model(config)  # or from_pretrained(name, dtype=torch.bfloat16)",
        "torch.set_default_dtype(torch.float32)  # {place} then converts nothing",
    ],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.set_default_dtype.html",
    at_most: false,
    programs: &["halved"],
    find,
};

#[derive(Debug)]
struct FinalDataType {
    converted: Vec<Converted>,
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let converted = if facts.run.phase == Phase::Load { converted(&facts.recorded) } else { Vec::new() };
    if converted.is_empty() { None } else { Some(Box::new(FinalDataType { converted })) }
}

impl Change for FinalDataType {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Kept
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        // A loaded tensor, or a parameter that is replaced, can be one that is converted.
        matches!(other, RuleId::LoadToCpu | RuleId::BuildOnMeta)
    }

    fn apply(&self, _facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        for Converted { from, to } in &self.converted {
            blocks.spans[*to as usize].start = blocks.spans[*from as usize].start;
            blocks.spans[*from as usize].vanish();
        }
    }

    fn phases(&self) -> &'static [Phase] {
        &[Phase::Load]
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        let converted = self.converted.iter().map(|converted| &facts.recorded.blocks[converted.to as usize]);
        let largest = converted.max_by_key(|block| block.size()).map(|block| block.start.stack);
        vec![("place", Value::Line(largest.unwrap_or_default()))]
    }
}

/// The file of `torch.nn.Module`, which converts one parameter after the other.
const MODULE: &str = "/torch/nn/modules/module.py";

/// A parameter, and the smaller one that replaces it. Indices of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Converted {
    from: u32,
    to: u32,
}

/// The conversions of parameters to a smaller data type while the model is loaded: the new parameter is allocated, and
/// right after that the old one is freed.
fn converted(recorded: &Recorded<'_>) -> Vec<Converted> {
    let is_in_module = |stack: StackId| {
        let (_, frame) =
            recorded.definitions.walk(stack).find(|(_, frame)| frame.is_some_and(|frame| !frame.native))?;
        frame.filter(|frame| frame.filename.ends_with(MODULE))
    };
    let conversion = |pair: &[BlockEvent]| {
        let [new, old] = pair else { return None };
        let (to, from) = (&recorded.blocks[new.block as usize], &recorded.blocks[old.block as usize]);
        let is_conversion = new.allocates
            && !old.allocates
            && to.start.phase == Phase::Load
            && from.start.phase == Phase::Load
            && [2, 4].contains(&(from.requested() / to.requested().max(1)))
            && from.requested() % to.requested().max(1) == 0
            && is_in_module(to.start.stack).is_some();
        is_conversion.then_some(Converted { from: old.block, to: new.block })
    };
    recorded.events.windows(2).filter_map(conversion).collect()
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::passes::category::Category;
    use crate::passes::lifetimes::BEFORE_STEPS;
    use crate::suggestions::test_program::{LOAD, MODULE, Program};

    #[test]
    fn parameters_in_their_final_type_are_not_converted() {
        let mut program = Program::default();
        let load = |program: &mut Program, mib: u64, stack: StackId| {
            let weight = program.alloc(mib, Phase::Load, Category::Parameter, ContextId::NONE);
            program.blocks[weight].start.step = BEFORE_STEPS;
            program.blocks[weight].start.stack = stack;
            weight
        };
        let weights = [load(&mut program, 40, LOAD), load(&mut program, 40, LOAD)];
        for weight in weights {
            load(&mut program, 20, MODULE);
            program.free(weight, ContextId::NONE);
        }
        // Code of the program replaces a tensor by a smaller one.
        let other = load(&mut program, 8, LOAD);
        load(&mut program, 4, LOAD);
        program.free(other, ContextId::NONE);
        assert_eq!(program.peak(), 80 + 20);
        assert_eq!(program.peak_with(find), 2 * 20 + 8 + 4);
    }
}
