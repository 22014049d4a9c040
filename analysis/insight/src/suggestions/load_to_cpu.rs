//! Tensors that `torch.load` or safetensors allocate on the device and that are freed later: their values are copied to
//! parameters. Loaded to the CPU, they need no device memory.

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::loaders::by_loader;
use crate::passes::lifetimes::NEVER;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::LoadToCpu,
    action: "load to the CPU at {place}: map_location=\"cpu\"",
    condition: "The peak is in loading, and torch.load or safetensors allocate tensors that are freed later.",
    method: "These tensors vanish.",
    cost: Cost::Free,
    code: &[r#"state = torch.load(path, map_location="cpu")  # {place}"#, "model.load_state_dict(state)"],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.load.html",
    at_most: false,
    programs: &["serve"],
    find,
};

/// The indices of tensors that are loaded and freed.
#[derive(Debug)]
struct LoadToCpu {
    loaded: Vec<u32>,
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let loaded = if facts.run.phase == Phase::Load { loaded(&facts.recorded) } else { Vec::new() };
    if loaded.is_empty() { None } else { Some(Box::new(LoadToCpu { loaded })) }
}

impl Change for LoadToCpu {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Kept
    }

    fn apply(&self, _facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        self.loaded.iter().for_each(|index| blocks.spans[*index as usize].vanish());
    }

    fn phases(&self) -> &'static [Phase] {
        &[Phase::Load]
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        let loaded = self.loaded.iter().map(|index| &facts.recorded.blocks[*index as usize]);
        let largest = loaded.max_by_key(|block| block.size()).map(|block| block.start.stack);
        vec![("place", Value::Line(largest.unwrap_or_default()))]
    }
}

/// The indices of tensors that are loaded and freed. At an error, those that are allocated count as well.
fn loaded(recorded: &Recorded<'_>) -> Vec<u32> {
    let mut is_loaded = by_loader(recorded);
    let blocks = recorded.blocks.iter().enumerate();
    let in_load = blocks.filter(|(_, block)| block.start.phase == Phase::Load);
    let freed = in_load.filter(|(_, block)| recorded.is_freed(block) || recorded.until < NEVER);
    freed.filter(|(_, block)| is_loaded(block.start.stack)).map(|(index, _)| index as u32).collect()
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::passes::category::Category;
    use crate::passes::lifetimes::BEFORE_STEPS;
    use crate::suggestions::test_program::{LOAD, Program};

    #[test]
    fn what_is_loaded_and_copied_vanishes() {
        let mut program = Program::default();
        let mut loaded = Vec::new();
        for _ in 0..3 {
            let index = program.alloc(50, Phase::Load, Category::Parameter, ContextId::NONE);
            program.blocks[index].start.stack = LOAD;
            program.blocks[index].start.step = BEFORE_STEPS;
            loaded.push(index);
        }
        let weight = program.alloc(150, Phase::Load, Category::Parameter, ContextId::NONE);
        program.blocks[weight].start.step = BEFORE_STEPS;
        program.free(loaded[0], ContextId::NONE);
        program.free(loaded[1], ContextId::NONE);
        assert_eq!(program.peak(), 300);
        // The third is used as it is.
        assert_eq!(program.peak_with(find), 200);
    }
}
