//! An optimizer that runs out of memory while it allocates its state.

use super::device_facts::{DeviceFacts, SharedFacts};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::category::Category;
use crate::passes::optimizer_state::state_needed;
use crate::passes::pass::Pass;
use crate::passes::phase::Phase;
use crate::rules::RuleId;
use crate::units::size_text;

/// The optimizer state does not fit.
static OPTIMIZER_STATE_DOES_NOT_FIT: DiagnosticRule = DiagnosticRule {
    id: RuleId::OptimizerStateDoesNotFit,
    meaning: "The first step of the optimizer allocates its state, and the GPU has no memory for all of it.",
    evidence: "An out-of-memory error occurs while an optimizer allocates its state. The kind of optimizer and the \
               parameters determine the size of the whole state.",
    limits: "The rule does not know the size of a state that depends on the optimizer's options.",
    code: &[
        "optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=lr)  # a quarter of the state",
        "# or shard it over the GPUs with FSDP2, and keep it on the CPU:",
        "fully_shard(model, reshard_after_forward=True, offload_policy=CPUOffloadPolicy())",
    ],
    link: "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
    kept_by: KeptBy::Nothing,
};

/// Needs no signal of its own: the device's out-of-memory errors show the issue.
#[derive(Clone, Debug, Default)]
pub(crate) struct OptimizerState;

impl Pass for OptimizerState {}

impl Diagnostic for OptimizerState {
    const RULES: &'static [&'static DiagnosticRule] = &[&OPTIMIZER_STATE_DOES_NOT_FIT];

    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        issues.extend(issue(device));
    }
}

fn issue(device: &DeviceFacts<'_>) -> Option<Issue> {
    let oom =
        device.ooms.all().find(|oom| oom.phase == Phase::Optimizer && oom.position.step.is_none_or(|s| s == 0))?;
    let needed = state_needed(device.growth, device.inputs.table);
    let of = |category: Category| oom.in_use.by_category()[category as usize].bytes;
    let (in_use, activations) = (of(Category::OptimizerState), of(Category::Activation));
    if needed.is_some_and(|needed| in_use >= needed) {
        return None;
    }
    let name = device.inputs.table.optimizer_name(oom.requested_at.0);
    let name = name.as_deref().unwrap_or("the optimizer");
    let all = needed.map_or(String::new(), |n| format!(" of the {} needed", size_text(n)));
    let phases = [Phase::Forward, Phase::Backward, Phase::Recompute];
    let total = device.table.total();
    let model_peak = phases.iter().map(|phase| total.phases[*phase as usize].peak).max().unwrap_or(0);
    let missing = needed.map_or(oom.requested, |n| n - in_use);
    Some(Issue {
        headline: match in_use {
            0 => format!("{name} allocates its state in the first step, and not even its first tensor fits"),
            _ => format!(
                "{name} allocates its state in the first step, and it does not fit: {}{all} was allocated",
                size_text(in_use)
            ),
        },
        evidence: vec![format!(
            "with {} allocated, a request of {} failed; forward and backward had peaked at {}",
            size_text(oom.in_use.usage.allocated),
            size_text(oom.requested),
            size_text(model_peak)
        )],
        place: Some(oom.requested_at),
        fix: format!(
            "keep the state in 8 bits, on the CPU or sharded (ZeRO, FSDP), or use an optimizer with less{}",
            if activations < missing { "; freeing activations does not help here" } else { "" }
        ),
        ..device.issue(&OPTIMIZER_STATE_DOES_NOT_FIT, missing)
    })
}
