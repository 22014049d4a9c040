//! Explains a phase's net change as text: what it kept, what it freed, and for optimizers the relation to the
//! parameters.
//!
//! All figures are measured. A relation ("two moments of each parameter") is stated only if the measured bytes are
//! within two percent of it.

use memtrace_insight::passes::{
    Amount, Category, Change, DeviceAnalysis, JoinedPhases, KeptMemory, Phase, RunPart, StackTable, only_optimizer,
    parameter_bytes,
};
use memtrace_insight::units::size_text;
use memtrace_trace::ids::StackId;

/// The maximum relative distance of a ratio from a whole number to be stated as that number.
const NEAR: f64 = 0.02;
/// Parts below this share of the largest part are omitted.
const SMALL_PART: f64 = 0.02;

/// The maximum number of categories that are named of those that a phase keeps, and of those that it frees.
const KEPT_PARTS: usize = 3;
const FREED_PARTS: usize = 2;

/// The maximum number of states per parameter. A higher ratio means states of several models.
const MAX_STATES: f64 = 4.0;

/// Explains one phase of one part of a run. `steps` is the number of steps that the figures are summed over. All
/// figures of the text are means over these steps.
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
    let freed: Vec<(Category, u64)> = freed.iter().map(|(category, amount)| (*category, amount.bytes)).collect();
    text(analysis, table, (part, phase, steps), &kept, &freed).join(", ")
}

/// Explains a part of one step. Its figures add up to the part's net change.
pub(crate) fn explain_part(analysis: &DeviceAnalysis, table: &StackTable, part: RunPart, of: &JoinedPhases) -> String {
    let kept = |(category, change): &(Category, Change)| {
        let amount = Amount { bytes: u64::try_from(change.bytes).ok()?, blocks: 0 };
        Some((*category, KeptMemory { amount, requested: change.requested.max(0).unsigned_abs() }))
    };
    let mut kept: Vec<(Category, KeptMemory)> = of.changes.iter().filter_map(kept).collect();
    let freed = of.changes.iter().filter(|(_, change)| change.bytes < 0);
    let mut freed: Vec<(Category, u64)> = freed.map(|(category, c)| (*category, c.bytes.unsigned_abs())).collect();
    kept.sort_by_key(|(_, kept)| std::cmp::Reverse(kept.amount.bytes));
    freed.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let phase = if of.phases.contains(&Phase::Optimizer) { Phase::Optimizer } else { of.phases[0] };
    text(analysis, table, (part, phase, 1), &kept, &freed).join(", ")
}

/// The largest categories of what is kept and of what is freed, and the sums of the others if they are large.
fn text(
    analysis: &DeviceAnalysis,
    table: &StackTable,
    (part, phase, steps): (RunPart, Phase, u64),
    kept: &[(Category, KeptMemory)],
    freed: &[(Category, u64)],
) -> Vec<String> {
    let per = |bytes: u64| size_text(bytes / steps.max(1));
    let largest =
        kept.iter().map(|(_, k)| k.amount.bytes).chain(freed.iter().map(|(_, bytes)| *bytes)).max().unwrap_or(0);
    let is_large = |bytes: u64| bytes > 0 && bytes as f64 >= largest as f64 * SMALL_PART;
    let mut parts = Vec::new();
    let is_named = |(at, bytes): (usize, u64), most: usize| at < most && is_large(bytes);
    let mut others = 0;
    for (at, (category, kept)) in kept.iter().enumerate() {
        if !is_named((at, kept.amount.bytes), KEPT_PARTS) {
            others += kept.amount.bytes;
            continue;
        }
        parts.push(match category {
            Category::OptimizerState => optimizer_state(analysis, table, (part, phase), kept, steps),
            Category::Gradient => gradients(analysis, kept, steps),
            Category::Unknown if phase == Phase::Load => format!("other {}", per(kept.amount.bytes)),
            _ => format!("{} {}", category.plural(), per(kept.amount.bytes)),
        });
    }
    if is_large(others) {
        parts.push(format!("others {}", per(others)));
    }
    others = 0;
    for (at, (category, bytes)) in freed.iter().enumerate() {
        if is_named((at, *bytes), FREED_PARTS) {
            parts.push(format!("{} freed {}", category.plural(), per(*bytes)));
        } else {
            others += bytes;
        }
    }
    if is_large(others) {
        parts.push(format!("others freed {}", per(others)));
    }
    parts
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
