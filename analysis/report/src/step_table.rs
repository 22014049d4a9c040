//! One step in time order: what was allocated at the start, peak and end of each phase. What does not happen in each
//! step stands apart, so that it dilutes no figure.

use memtrace_insight::passes::Phase;
use memtrace_summary::{
    DeviceSummary, Levels, PhaseSummary, StepPhase, StepSummary, count_text, signed_size_text, size_text,
};

use crate::parts::has_phases;
use crate::table::{Align, Table};
use crate::text_report::TextReport;

/// The phases of a micro-batch.
const PASSES: [Phase; 3] = [Phase::Forward, Phase::Backward, Phase::Recompute];

impl TextReport {
    /// Adds the phases of one step, and those outside it. `name` is the device, if there are several.
    pub(crate) fn one_step(&mut self, device: &DeviceSummary, name: Option<&str>) {
        if !has_phases(device) {
            return;
        }
        let on = name.map(|name| format!(" on {name}")).unwrap_or_default();
        let (title, step, explanations) = match (&device.typical_step, device.by_step.first()) {
            (Some(step), _) => (typical_title(device, step), Some(step), &device.later_steps),
            (None, Some(step)) => (first_title(device, step), Some(step), &device.first_step),
            (None, None) => ("By phase".to_owned(), None, &device.first_step),
        };
        let mut table = Table::new(&[
            (&format!("{title}{on}"), Align::Left),
            ("Start", Align::Right),
            ("Peak", Align::Right),
            ("End", Align::Right),
            ("What changed", Align::Left),
        ]);
        if let Some(step) = step {
            step_rows(&mut table, step, explanations);
        }
        outside_rows(&mut table, device, step);
        let lines = table.lines(0, self.width, self.style);
        if lines.len() > 1 {
            self.blank();
            self.lines.extend(lines);
        }
    }
}

fn typical_title(device: &DeviceSummary, step: &StepSummary) -> String {
    match device.later_steps_count {
        1 => format!("Step {}", step.step),
        _ => format!("One step ({} of {})", step.step, count_text(device.steps.into())),
    }
}

fn first_title(device: &DeviceSummary, step: &StepSummary) -> String {
    let oom = device.explained_oom.and_then(|at| device.ooms.get(at));
    let is_cut_off = oom.is_some_and(|oom| oom.in_use.step == Some(step.step));
    format!("Step {}{}", step.step, if is_cut_off { " up to the error" } else { "" })
}

/// The rows of a step. The passes of several micro-batches share a row.
fn step_rows(table: &mut Table, step: &StepSummary, explanations: &[PhaseSummary]) {
    let explanation = |phase: Phase| {
        explanations.iter().find(|row| row.phase == phase).map_or("", |row| row.explanation.as_str()).to_owned()
    };
    let mut passes = step.passes.filter(|_| step.micro_batches > 1);
    let joined = passes.is_some();
    for row in &step.phases {
        match passes.take_if(|_| PASSES.contains(&row.phase)) {
            Some(levels) => {
                let all = PASSES.map(explanation).join(", ");
                let name = format!("{} x forward + backward", count_text(step.micro_batches));
                table.row(cells(&name, levels, &changes(&all)));
            }
            None if joined && PASSES.contains(&row.phase) => {}
            None => table.row(cells(row.phase.name(), levels(row), &changes(&explanation(row.phase)))),
        }
    }
}

/// The rows of what is not in the step: what came before the first step, and phases that few steps have.
fn outside_rows(table: &mut Table, device: &DeviceSummary, step: Option<&StepSummary>) {
    let rows: Vec<&PhaseSummary> = device.before_first_step.iter().collect();
    if step.is_some() && !rows.is_empty() {
        table.caption("before the first step");
    }
    for row in rows {
        let levels = Levels { start_bytes: row.start_bytes, peak_bytes: row.peak_bytes, end_bytes: row.after_bytes };
        table.row(cells(row.phase.name(), levels, &changes(&row.explanation)));
    }
    let Some(step) = step.filter(|_| device.typical_step.is_some()) else { return };
    let is_listed = |phase: Phase| step.phases.iter().any(|row| row.phase == phase);
    let rare: Vec<&PhaseSummary> = device.later_steps.iter().filter(|row| !is_listed(row.phase)).collect();
    if !rare.is_empty() {
        table.caption("only in some steps");
    }
    for row in rare {
        let count = format!("in {} of {} steps", row.steps, count_text(device.later_steps_count.into()));
        let mut line = cells(row.phase.name(), Levels { peak_bytes: row.peak_bytes, ..Levels::default() }, "");
        line[1].clear();
        line[3].clear();
        line[4] = match changes(&row.explanation) {
            text if text.is_empty() => count,
            text => format!("{text}, {count}"),
        };
        table.row(line);
    }
}

fn levels(row: &StepPhase) -> Levels {
    Levels { start_bytes: row.start_bytes, peak_bytes: row.peak_bytes, end_bytes: row.end_bytes }
}

/// The cells of a row. Without an explanation, the net change is one.
fn cells(name: &str, levels: Levels, changes: &str) -> Vec<String> {
    let net = levels.end_bytes as i64 - levels.start_bytes as i64;
    let changes = match changes {
        "" if net != 0 => signed_size_text(net),
        text => text.to_owned(),
    };
    vec![
        format!("  {name}"),
        size_text(levels.start_bytes),
        size_text(levels.peak_bytes),
        size_text(levels.end_bytes),
        changes,
    ]
}

/// The parts of an explanation with their signs: `+ activations 1.00 GiB, - gradients 64.2 MiB`, without what one part
/// adds and another takes away.
fn changes(explanation: &str) -> String {
    let parts = signed(explanation);
    let is_cancelled = |(sign, text): &(char, String)| parts.iter().any(|(other, same)| other != sign && same == text);
    let left = parts.iter().filter(|part| !is_cancelled(part));
    left.map(|(sign, text)| format!("{sign} {text}")).collect::<Vec<_>>().join(", ")
}

fn signed(explanation: &str) -> Vec<(char, String)> {
    let parts = explanation.split(", ").filter(|part| !part.is_empty());
    parts
        .map(|part| match part.split_once(" freed ") {
            Some((what, bytes)) => ('-', format!("{what} {bytes}")),
            None => ('+', part.to_owned()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::style::TextOptions;

    fn phase(phase: Phase, explanation: &str) -> PhaseSummary {
        PhaseSummary { phase, steps: 1, explanation: explanation.into(), ..PhaseSummary::default() }
    }

    fn step_phase(phase: Phase, [start, peak, end]: [u64; 3]) -> StepPhase {
        let (start_bytes, peak_bytes, end_bytes) = (start << 20, peak << 20, end << 20);
        StepPhase { phase, start_bytes, peak_bytes, end_bytes, ..StepPhase::default() }
    }

    #[test]
    fn micro_batches_share_a_row_and_rare_phases_stand_apart() {
        let step = StepSummary {
            step: 5,
            micro_batches: 4,
            phases: vec![
                step_phase(Phase::Forward, [10, 30, 20]),
                step_phase(Phase::Backward, [30, 32, 14]),
                step_phase(Phase::Optimizer, [14, 15, 10]),
            ],
            passes: Some(Levels { start_bytes: 10 << 20, peak_bytes: 32 << 20, end_bytes: 14 << 20 }),
            ..StepSummary::default()
        };
        let device = DeviceSummary {
            steps: 12,
            later_steps_count: 11,
            before_first_step: vec![PhaseSummary { peak_bytes: 9 << 20, ..phase(Phase::Load, "parameters 9.00 MiB") }],
            later_steps: vec![
                phase(Phase::Forward, "activations 20.0 MiB"),
                phase(Phase::Backward, "gradients 4.00 MiB (one of each parameter), activations freed 20.0 MiB"),
                phase(Phase::Optimizer, "gradients freed 4.00 MiB"),
                PhaseSummary { steps: 2, peak_bytes: 11 << 20, ..phase(Phase::Eval, "") },
            ],
            by_step: vec![step.clone()],
            typical_step: Some(step),
            ..DeviceSummary::default()
        };
        let mut report = TextReport::new(&TextOptions::default());
        report.one_step(&device, None);
        let expected = [
            "",
            "One step (5 of 12)           Start      Peak       End  What changed",
            "  4 x forward + backward  10.0 MiB  32.0 MiB  14.0 MiB  + gradients 4.00 MiB (one of each parameter)",
            "  optimizer               14.0 MiB  15.0 MiB  10.0 MiB  - gradients 4.00 MiB",
            "before the first step",
            "  load                           0  9.00 MiB         0  + parameters 9.00 MiB",
            "only in some steps",
            "  eval                              11.0 MiB            in 2 of 11 steps",
        ];
        assert_eq!(report.lines, expected);
    }
}
