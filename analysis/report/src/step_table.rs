//! One step in time order: what was allocated at the start, peak and end of each phase. Work that does not happen in
//! each step is listed apart, so that it dilutes no figure.

use memtrace_insight::passes::Phase;
use memtrace_summary::{
    DeviceSummary, JoinedPhasesSummary, Levels, PhaseSummary, StepPhase, StepSummary, count_text, signed_size_text,
    size_text,
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
        let (title, step) = match (&device.typical_step, device.by_step.first()) {
            (Some(step), _) => (typical_title(device, step), Some(step)),
            (None, Some(step)) => (first_title(device, step), Some(step)),
            (None, None) => ("By phase".to_owned(), None),
        };
        let mut table = Table::new(&[
            (&format!("{title}{on}"), Align::Left),
            ("Start", Align::Right),
            ("Peak", Align::Right),
            ("End", Align::Right),
            ("What changed", Align::Left),
        ]);
        if let Some(step) = step {
            step_rows(&mut table, step);
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
        // Steps count from 0.
        _ => format!("Step {} of 0 to {}", step.step, count_text(device.steps.saturating_sub(1).into())),
    }
}

fn first_title(device: &DeviceSummary, step: &StepSummary) -> String {
    let oom = device.explained_oom.and_then(|at| device.ooms.get(at));
    let is_cut_off = oom.is_some_and(|oom| oom.in_use.step == Some(step.step));
    format!("Step {}{}", step.step, if is_cut_off { " up to the error" } else { "" })
}

/// The rows of a step. Phases that take turns share a row, and have rows of their own with their peaks below it, unless
/// they are the passes of micro-batches.
fn step_rows(table: &mut Table, step: &StepSummary) {
    for part in &step.joined_phases {
        let names: Vec<&str> = part.phases.iter().map(|phase| phase.name()).collect();
        let accumulates = step.micro_batches > 1 && part.phases.contains(&Phase::Forward);
        let is_passes = accumulates && part.phases.iter().all(|phase| PASSES.contains(phase));
        let name = match accumulates {
            true if is_passes => format!("{} x forward + backward", count_text(step.micro_batches)),
            true => format!("{} x {}", count_text(step.micro_batches), names.join(" + ")),
            false => names.join(" + "),
        };
        table.row(cells(&name, part_levels(part), &changes(&part.explanation)));
        if part.phases.len() == 1 || is_passes {
            continue;
        }
        for row in step.phases.iter().filter(|row| part.phases.contains(&row.phase)) {
            let mut line = cells(&format!("  {}", row.phase.name()), levels(row), "");
            line[1].clear();
            line[3].clear();
            line[4] = format!("in {} parts", count_text(row.turns.into()));
            table.row(line);
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
            text if row.steps > 1 => format!("{text} on average, {count}"),
            text => format!("{text}, {count}"),
        };
        table.row(line);
    }
}

fn part_levels(part: &JoinedPhasesSummary) -> Levels {
    Levels { start_bytes: part.start_bytes, peak_bytes: part.peak_bytes, end_bytes: part.end_bytes }
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

    fn part(phases: &[Phase], [start, peak, end]: [u64; 3], explanation: &str) -> JoinedPhasesSummary {
        let (start_bytes, peak_bytes, end_bytes) = (start << 20, peak << 20, end << 20);
        JoinedPhasesSummary {
            phases: phases.to_vec(),
            start_bytes,
            peak_bytes,
            end_bytes,
            explanation: explanation.into(),
        }
    }

    fn step_phase(phase: Phase, peak: u64, turns: u32) -> StepPhase {
        StepPhase { phase, peak_bytes: peak << 20, turns, ..StepPhase::default() }
    }

    fn lines(device: &DeviceSummary) -> Vec<String> {
        let mut report = TextReport::new(&TextOptions::default());
        report.one_step(device, None);
        report.lines
    }

    #[test]
    fn phases_that_take_turns_share_a_row_and_have_their_peaks() {
        let step = StepSummary {
            step: 1,
            phases: vec![step_phase(Phase::Backward, 32, 25), step_phase(Phase::Recompute, 31, 24)],
            joined_phases: vec![
                part(&[Phase::Forward], [10, 30, 20], "activations 10.0 MiB"),
                part(
                    &[Phase::Backward, Phase::Recompute],
                    [20, 32, 14],
                    "gradients 4.00 MiB (one of each parameter), activations freed 10.0 MiB",
                ),
            ],
            ..StepSummary::default()
        };
        let device = DeviceSummary {
            steps: 2,
            later_steps_count: 1,
            first_step: vec![phase(Phase::Forward, "")],
            typical_step: Some(step),
            ..DeviceSummary::default()
        };
        let lines = lines(&device);
        assert_eq!(lines.len(), 7, "{lines:?}");
        assert!(lines[2].ends_with("+ activations 10.0 MiB"), "{lines:?}");
        assert_eq!(lines[5].split_whitespace().collect::<Vec<_>>().join(" "), "backward 32.0 MiB in 25 parts");
        assert_eq!(lines[6].split_whitespace().collect::<Vec<_>>().join(" "), "recompute 31.0 MiB in 24 parts");
    }

    #[test]
    fn micro_batches_share_a_row_and_rare_phases_stand_apart() {
        let step = StepSummary {
            step: 5,
            micro_batches: 4,
            phases: vec![
                step_phase(Phase::Forward, 30, 4),
                step_phase(Phase::Backward, 32, 4),
                step_phase(Phase::Optimizer, 15, 1),
            ],
            joined_phases: vec![
                part(&[Phase::Forward, Phase::Backward], [10, 32, 14], "gradients 4.00 MiB (one of each parameter)"),
                part(&[Phase::Optimizer], [14, 15, 10], "gradients freed 4.00 MiB"),
            ],
            ..StepSummary::default()
        };
        let device = DeviceSummary {
            steps: 12,
            later_steps_count: 11,
            before_first_step: vec![PhaseSummary { peak_bytes: 9 << 20, ..phase(Phase::Load, "parameters 9.00 MiB") }],
            later_steps: vec![
                phase(Phase::Forward, ""),
                phase(Phase::Backward, ""),
                phase(Phase::Optimizer, ""),
                PhaseSummary { steps: 2, peak_bytes: 11 << 20, ..phase(Phase::Eval, "inputs 1.00 MiB") },
            ],
            by_step: vec![step.clone()],
            typical_step: Some(step),
            ..DeviceSummary::default()
        };
        let expected = [
            "",
            "Step 5 of 0 to 11            Start      Peak       End  What changed",
            "  4 x forward + backward  10.0 MiB  32.0 MiB  14.0 MiB  + gradients 4.00 MiB (one of each parameter)",
            "  optimizer               14.0 MiB  15.0 MiB  10.0 MiB  - gradients 4.00 MiB",
            "before the first step",
            "  load                           0  9.00 MiB         0  + parameters 9.00 MiB",
            "only in some steps",
            "  eval                              11.0 MiB            + inputs 1.00 MiB on average,",
            "                                                        in 2 of 11 steps",
        ];
        assert_eq!(lines(&device), expected);
    }
}
