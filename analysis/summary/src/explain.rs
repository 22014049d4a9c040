//! Explains a phase's net change as text: what it kept, what it freed, and for optimizers the relation to the
//! parameters.
//!
//! All figures are measured. A relation ("two moments of each parameter") is stated only if the measured bytes are
//! within two percent of it.

use crate::units::size_text;
use memtrace_insight::passes::{Category, DeviceAnalysis, KeptMemory, Phase, RunPart, StackTable};

/// The maximum relative distance of a ratio from a whole number to be stated as that number.
const NEAR: f64 = 0.02;
/// Parts below this share of the largest part are omitted.
const SMALL_PART: f64 = 0.02;

/// The maximum number of states per parameter. A higher ratio means states of several models.
const MAX_STATES: f64 = 4.0;

/// Explains one phase of one part of a run. `steps`: the number of steps that the figures are summed over. All figures of
/// the text are means over these steps.
pub(crate) fn explain(
    analysis: &DeviceAnalysis,
    table: &StackTable,
    part: RunPart,
    phase: Phase,
    steps: u64,
) -> String {
    let lasting = |category: &Category| !category.is_passing();
    let mut kept = analysis.growth.kept(part, phase);
    let mut freed = analysis.growth.freed_of_other_phases(part, phase);
    kept.retain(|(category, _)| lasting(category));
    freed.retain(|(category, _)| lasting(category));
    let per = |bytes: u64| bytes / steps.max(1);
    let largest = kept.iter().map(|(_, k)| k.amount.bytes).chain(freed.iter().map(|(_, a)| a.bytes)).max().unwrap_or(0);
    let is_large = |bytes: u64| bytes > 0 && bytes as f64 >= largest as f64 * SMALL_PART;
    let mut parts = Vec::new();
    for (category, kept) in kept.iter().filter(|(_, k)| is_large(k.amount.bytes)).take(3) {
        let bytes = size_text(per(kept.amount.bytes));
        parts.push(match category {
            Category::OptimizerState => optimizer_state(analysis, table, part, phase, kept, steps),
            Category::Gradient => gradients(analysis, kept, steps),
            Category::Unknown if phase == Phase::Load => format!("other {bytes}"),
            _ => format!("{} {bytes}", category.plural()),
        });
    }
    for (category, amount) in freed.iter().filter(|(_, a)| is_large(a.bytes)).take(2) {
        parts.push(format!("{} freed {}", category.plural(), size_text(per(amount.bytes))));
    }
    parts.join(", ")
}

/// Formats optimizer state: `two moments of each parameter (Adam): 2 x 18.6 GiB`.
fn optimizer_state(
    analysis: &DeviceAnalysis,
    table: &StackTable,
    part: RunPart,
    phase: Phase,
    kept: &KeptMemory,
    steps: u64,
) -> String {
    let sources =
        analysis.growth.sources(|s| s.part == part && s.phase == phase && s.category == Category::OptimizerState);
    let optimizer = sources.iter().find_map(|(source, _)| table.facts(source.stack).optimizer);
    let mean = size_text(kept.amount.bytes / steps.max(1));
    let plain = match optimizer {
        Some(optimizer) => format!("optimizer state ({}) {mean}", optimizer.name),
        None => format!("optimizer state {mean}"),
    };
    // The sum over several steps can have the size of the parameters by chance.
    if steps > 1 {
        return plain;
    }
    let Some((base, what)) = parameter_bytes(analysis) else { return plain };
    let ratio = kept.requested as f64 / base as f64;
    let whole = ratio.round();
    if !(1.0..=MAX_STATES).contains(&whole) || (ratio - whole).abs() > NEAR * whole {
        return plain;
    }
    let (noun, name) = match optimizer {
        Some(o) => match o.state_per_parameter {
            Some((noun, each)) if f64::from(each) == whole => (noun.to_owned(), format!(" ({})", o.name)),
            _ => ("states".to_owned(), format!(" ({})", o.name)),
        },
        None => ("states".to_owned(), String::new()),
    };
    let number = match whole as u32 {
        1 => "one".to_owned(),
        2 => "two".to_owned(),
        3 => "three".to_owned(),
        n => n.to_string(),
    };
    let noun = if whole == 1.0 { noun.trim_end_matches('s').to_owned() } else { noun };
    format!("{number} {noun} of each {what}{name}: {whole} x {}", size_text(base))
}

/// Formats gradients: `gradients 18.6 GiB (one of each parameter)`.
fn gradients(analysis: &DeviceAnalysis, kept: &KeptMemory, steps: u64) -> String {
    let text = format!("gradients {}", size_text(kept.amount.bytes / steps.max(1)));
    let parameters = analysis.growth.total(Category::Parameter).requested;
    let each = kept.requested / steps.max(1);
    let is_one_each = parameters > 0 && (each as f64 / parameters as f64 - 1.0).abs() <= NEAR;
    if is_one_each { format!("{text} (one of each parameter)") } else { text }
}

/// The bytes that the optimizer works on: the gradients of the first step, else the parameters. `None` if neither is
/// known.
pub(crate) fn parameter_bytes(analysis: &DeviceAnalysis) -> Option<(u64, &'static str)> {
    let gradients: u64 = analysis
        .growth
        .sources(|s| s.category == Category::Gradient && s.part == RunPart::FirstStep)
        .iter()
        .map(|(_, kept)| kept.requested)
        .sum();
    let parameters = analysis.growth.total(Category::Parameter).requested;
    // Each parameter has at most one gradient. Accumulated or duplicated gradients exceed that and are not used.
    if gradients > 0 && (parameters == 0 || gradients <= parameters + parameters / 50) {
        return Some((gradients, "parameter"));
    }
    (parameters > 0).then_some((parameters, "parameter"))
}

/// The total state that an optimizer needs, in bytes. Used if an error interrupted the optimizer while it allocated its
/// state.
pub(crate) fn state_needed(analysis: &DeviceAnalysis, table: &StackTable) -> Option<u64> {
    let sources = analysis.growth.sources(|s| s.category == Category::OptimizerState);
    let (_, each) = sources.iter().find_map(|(source, _)| table.facts(source.stack).optimizer)?.state_per_parameter?;
    Some(parameter_bytes(analysis)?.0 * u64::from(each))
}
