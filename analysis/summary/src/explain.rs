//! Explains a phase's net change as text: what it kept, what it freed, and for optimizers the relation to the
//! parameters.
//!
//! All figures are measured. A relation ("two moments of each parameter") is stated only if the measured bytes are
//! within two percent of it.

use memtrace_insight::passes::{
    Category, DeviceAnalysis, KeptMemory, Phase, RunPart, StackTable, only_optimizer, parameter_bytes,
};
use memtrace_insight::units::size_text;
use memtrace_trace::ids::StackId;

/// The maximum relative distance of a ratio from a whole number to be stated as that number.
const NEAR: f64 = 0.02;
/// Parts below this share of the largest part are omitted.
const SMALL_PART: f64 = 0.02;

/// The maximum number of states per parameter. A higher ratio means states of several models.
const MAX_STATES: f64 = 4.0;

/// Explains one phase of one part of a run. `steps`: the number of steps that the figures are summed over. All figures
/// of the text are means over these steps.
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
            Category::OptimizerState => optimizer_state(analysis, table, (part, phase), kept, steps),
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
    (part, phase): (RunPart, Phase),
    kept: &KeptMemory,
    steps: u64,
) -> String {
    let sources =
        analysis.growth.sources(|s| s.part == part && s.phase == phase && s.category == Category::OptimizerState);
    let bytes = size_text(kept.amount.bytes / steps.max(1));
    let stack = match only_optimizer(&sources, table) {
        Some(stack) => stack,
        // A relation to the parameters is that of one optimizer, not of several.
        None if sources.iter().any(|(source, _)| table.facts(source.stack).optimizer.is_some()) => {
            return format!("optimizer state {bytes}");
        }
        None => StackId::NONE,
    };
    let optimizer = table.facts(stack).optimizer;
    let class = table.optimizer_name(stack).map_or(String::new(), |class| format!(" ({class})"));
    let plain = format!("optimizer state{class} {bytes}");
    let Some((base, what)) = parameter_bytes(&analysis.growth) else { return plain };
    // A mean over several steps is no relation of one step.
    let ratio = if steps > 1 { 0.0 } else { kept.requested as f64 / base as f64 };
    let whole = ratio.round();
    if !(1.0..=MAX_STATES).contains(&whole) || (ratio - whole).abs() > NEAR * whole {
        return plain;
    }
    let noun = match optimizer.and_then(|optimizer| optimizer.state_per_parameter) {
        Some((noun, each)) if f64::from(each) == whole => noun,
        _ => "states",
    };
    let number = match whole as u32 {
        1 => "one".to_owned(),
        2 => "two".to_owned(),
        3 => "three".to_owned(),
        n => n.to_string(),
    };
    let noun = if whole == 1.0 { noun.trim_end_matches('s') } else { noun };
    format!("{number} {noun} of each {what}{class}: {whole} x {}", size_text(base))
}

/// Formats gradients: `gradients 18.6 GiB (one of each parameter)`.
fn gradients(analysis: &DeviceAnalysis, kept: &KeptMemory, steps: u64) -> String {
    let text = format!("gradients {}", size_text(kept.amount.bytes / steps.max(1)));
    let parameters = analysis.growth.total(Category::Parameter).requested;
    let each = kept.requested / steps.max(1);
    let is_one_each = parameters > 0 && (each as f64 / parameters as f64 - 1.0).abs() <= NEAR;
    if is_one_each { format!("{text} (one of each parameter)") } else { text }
}
