//! The state that an optimizer keeps, in relation to the parameters.

use std::collections::BTreeSet;

use memtrace_trace::ids::StackId;

use super::category::Category;
use super::growth::{Growth, GrowthSource, KeptMemory, RunPart};
use super::stacks::StackTable;

/// States below this share of the largest one are not counted.
const SMALL_STATE: f64 = 0.02;

/// A stack of the optimizer that allocated all of this state; `None` if several optimizers did, or none is known.
pub fn only_optimizer(sources: &[(GrowthSource, KeptMemory)], table: &StackTable) -> Option<StackId> {
    let name = |stack: StackId| table.facts(stack).optimizer.map(|optimizer| optimizer.name);
    let first = sources.first()?.0.stack;
    let is_only = name(first).is_some() && sources.iter().all(|(source, _)| name(source.stack) == name(first));
    is_only.then_some(first)
}

/// The bytes that the optimizer works on: the gradients of the first step, else the parameters. `None` if neither is
/// known.
pub fn parameter_bytes(growth: &Growth) -> Option<(u64, &'static str)> {
    let gradients: u64 = growth
        .sources(|s| s.category == Category::Gradient && s.part == RunPart::FirstStep)
        .iter()
        .map(|(_, kept)| kept.requested)
        .sum();
    let parameters = growth.total(Category::Parameter).requested;
    // Each parameter has at most one gradient. Accumulated or duplicated gradients exceed that and are not used.
    if gradients > 0 && (parameters == 0 || gradients <= parameters + parameters / 50) {
        return Some((gradients, "parameter"));
    }
    (parameters > 0).then_some((parameters, "parameter"))
}

/// The total state that an optimizer needs, in bytes. Used if an error interrupted the optimizer while it allocated its
/// state.
pub fn state_needed(growth: &Growth, table: &StackTable) -> Option<u64> {
    let sources = growth.sources(|s| s.category == Category::OptimizerState);
    let (_, each) = table.facts(only_optimizer(&sources, table)?).optimizer?.state_per_parameter?;
    // Options such as amsgrad add states, each of which has a line of its own.
    let largest = sources.iter().map(|(_, kept)| kept.amount.bytes).max()?;
    let is_large = |kept: &KeptMemory| kept.amount.bytes as f64 > largest as f64 * SMALL_STATE;
    let states = sources.iter().filter(|(_, kept)| is_large(kept)).map(|(source, _)| table.python(source.stack));
    let states = states.collect::<BTreeSet<_>>().len();
    (states <= each as usize).then_some(parameter_bytes(growth)?.0 * u64::from(each))
}
