//! How reports name points in time.

use memtrace_insight::passes::Phase;

use crate::summary::{DeviceSummary, MemoryState, OomSummary};

/// Formats a position after a space: ` at step 0, optimizer`. Empty if the program is in no phase, as one without
/// PyTorch.
pub fn when(step: Option<u32>, phase: Phase) -> String {
    match (step, phase) {
        (Some(step), _) => format!(" at step {step}, {}", phase.name()),
        (None, Phase::Load) => " while loading".to_owned(),
        (None, Phase::Other) => String::new(),
        (None, _) => format!(" before the first step, {}", phase.name()),
    }
}

/// When the request of an error was refused: a stage of the server, else the step and the phase. Empty if it is
/// unknown.
pub fn when_refused(device: &DeviceSummary, oom: &OomSummary) -> String {
    let Some(server) = device.server_only() else { return when(oom.in_use.step, oom.in_use.phase) };
    let is_explained = device.explained_oom().is_some_and(|explained| std::ptr::eq(explained, oom));
    let stage = server.error_stage.filter(|_| is_explained);
    stage.map_or(String::new(), |stage| format!(" {}", stage.clause()))
}

/// The step and the phase of a peak. The peak of an optimizer that steps inside the backward pass is part of that pass:
/// the activations that it still needs are allocated.
pub fn when_peaked(peak: &MemoryState) -> String {
    let in_backward = peak.allocated_at.as_ref().is_some_and(|stack| stack.node.is_some());
    let inside = if peak.phase == Phase::Optimizer && in_backward { " inside the backward pass" } else { "" };
    format!("{}{inside}", when(peak.step, peak.phase))
}
