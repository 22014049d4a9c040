//! Parameters that loaded tensors replace: `load_state_dict(assign=True)` makes the tensors that it gets parameters of
//! the model. Built on the meta device, the model has no values to replace.

use std::collections::BTreeMap;

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::loaders::by_loader;
use crate::passes::category::Category;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::BuildOnMeta,
    action: "build the model of {place} on the meta device: with torch.device(\"meta\"). Loaded tensors replace its \
             parameters",
    condition: "The peak is in loading. Tensors that torch.load or safetensors allocate become parameters, as \
                load_state_dict(assign=True) makes them. The blocks that are freed together for them have the same \
                sizes.",
    method: "The freed blocks vanish.",
    cost: Cost::Free,
    code: &[
        r#"with torch.device("meta"):  # {place}"#,
        "    model = Model(config)",
        r#"model.load_state_dict(torch.load(path, map_location="cuda", mmap=True), assign=True)"#,
    ],
    link: "https://docs.pytorch.org/docs/stable/meta.html",
    at_most: false,
    programs: &["assigned"],
    find,
};

/// The indices of the blocks that loaded parameters replace.
#[derive(Debug)]
struct BuildOnMeta {
    replaced: Vec<u32>,
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let replaced = if facts.run.phase == Phase::Load { replaced(&facts.recorded) } else { Vec::new() };
    if replaced.is_empty() { None } else { Some(Box::new(BuildOnMeta { replaced })) }
}

impl Change for BuildOnMeta {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Kept
    }

    fn apply(&self, _facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        self.replaced.iter().for_each(|index| blocks.spans[*index as usize].vanish());
    }

    fn phases(&self) -> &'static [Phase] {
        &[Phase::Load]
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        let replaced = self.replaced.iter().map(|index| &facts.recorded.blocks[*index as usize]);
        let largest = replaced.max_by_key(|block| block.size()).map(|block| block.start.stack);
        vec![("place", Value::Line(largest.unwrap_or_default()))]
    }
}

/// The indices of the blocks that loaded parameters of the same sizes replace. Frees without an allocation between them
/// belong together.
fn replaced(recorded: &Recorded<'_>) -> Vec<u32> {
    let mut is_loaded = by_loader(recorded);
    let in_load = recorded.blocks.iter().filter(|block| block.start.phase == Phase::Load);
    let last = in_load.map(|block| block.allocated).max().unwrap_or(0);
    // By requested size: the loaded parameters that have replaced nothing.
    let mut loaded: BTreeMap<u64, usize> = BTreeMap::new();
    let (mut replaced, mut freed) = (Vec::new(), Vec::new());
    for event in &recorded.events {
        let block = &recorded.blocks[event.block as usize];
        if event.allocates {
            replaced.append(&mut with_equals(std::mem::take(&mut freed), &mut loaded));
            let stays = block.start.phase == Phase::Load && (block.freed > last || !recorded.is_freed(block));
            if stays && block.category == Category::Parameter && is_loaded(block.start.stack) {
                *loaded.entry(block.requested()).or_default() += 1;
            }
        } else if block.start.phase == Phase::Load && !is_loaded(block.start.stack) {
            freed.push((event.block, block.requested()));
        }
    }
    replaced.append(&mut with_equals(freed, &mut loaded));
    replaced
}

/// Those of the freed blocks that replace loaded parameters: all, if there is a loaded parameter of its size for each.
fn with_equals(freed: Vec<(u32, u64)>, loaded: &mut BTreeMap<u64, usize>) -> Vec<u32> {
    let mut left = loaded.clone();
    let has_equal = |(_, requested): &(u32, u64)| match left.get_mut(requested) {
        Some(count) if *count > 0 => {
            *count -= 1;
            true
        }
        _ => false,
    };
    if freed.is_empty() || !freed.iter().all(has_equal) {
        return Vec::new();
    }
    *loaded = left;
    freed.into_iter().map(|(block, _)| block).collect()
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::{ContextId, StackId};

    use super::*;
    use crate::passes::lifetimes::BEFORE_STEPS;
    use crate::suggestions::test_program::{LOAD, MODULE, Program};

    #[test]
    fn parameters_that_loaded_ones_replace_vanish() {
        // By case: the sizes that are loaded, and whether the loaded tensors are freed while loading goes on.
        for (sizes, is_freed, is_replaced) in [
            (vec![30, 50], false, true),
            (vec![30], false, false),
            (vec![30, 40], false, false),
            (vec![30, 50], true, false),
        ] {
            let mut program = Program::default();
            let load = |program: &mut Program, mib: u64, category: Category, stack: StackId| {
                let weight = program.alloc(mib, Phase::Load, category, ContextId::NONE);
                program.blocks[weight].start.step = BEFORE_STEPS;
                program.blocks[weight].start.stack = stack;
                weight
            };
            let built = [30, 50].map(|mib| load(&mut program, mib, Category::Unknown, MODULE));
            let loaded: u64 = sizes.iter().sum();
            let loaded_blocks: Vec<usize> =
                sizes.into_iter().map(|mib| load(&mut program, mib, Category::Parameter, LOAD)).collect();
            built.into_iter().for_each(|weight| program.free(weight, ContextId::NONE));
            if is_freed {
                loaded_blocks.into_iter().for_each(|block| program.free(block, ContextId::NONE));
                load(&mut program, 1, Category::Parameter, MODULE);
            }
            assert_eq!(program.peak(), 80 + loaded);
            assert_eq!(program.peak_with(find), if is_replaced { loaded } else { 80 + loaded }, "{loaded} {is_freed}");
        }
    }
}
