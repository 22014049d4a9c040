//! The comparison of two runs as text, with the most important result first.

use memtrace_insight::rules::NO_CUSTOM_CATEGORY;
use memtrace_summary::{
    Change, DevicePair, DiffReport, DiffResult, DiffRun, UnpairedDevice, count_text, device_text, line_what,
    signed_size_text, size_text,
};

use crate::fit::{columns, location_in, wrap_words};
use crate::style::{TextOptions, ToText};
use crate::table::{Align, Table};
use crate::text_report::TextReport;

/// The maximum number of rows of a table.
const ROWS: usize = 10;
/// The heading of stacks. Stacks with as many bytes in both runs are not in the table, so it has no row of others.
const STACK: &str = "Stack";
/// The maximum number of devices listed. One of them is shown in full.
const PAIRS: usize = 16;

impl ToText for DiffReport {
    /// The comparison for a terminal.
    fn to_text(&self, options: &TextOptions) -> String {
        let mut report = TextReport::new(options);
        report.line(format!("memtrace diff    A: {}    B: {}", name(&self.a), name(&self.b)));
        let many = self.pairs.len() > 1;
        for headline in headlines(self) {
            for (i, line) in wrap_words(&headline, report.width.saturating_sub(2)).iter().enumerate() {
                report.heading(&format!("{}{line}", if i == 0 { "" } else { "  " }));
            }
        }
        if self.pairs.len() > PAIRS {
            report.line(format!("{} more devices with smaller differences: see --json", self.pairs.len() - PAIRS));
        }
        if let Some(pair) = self.pairs.first() {
            if many && pair.result != DiffResult::Same {
                report.blank();
                report.line(format!("{}in full:", title(pair)));
            }
            report.pair(pair);
        }
        remarks(self).iter().for_each(|remark| report.note(remark));
        report.text()
    }
}

/// The result of each device that is in both runs, most important first.
pub(crate) fn headlines(report: &DiffReport) -> Vec<String> {
    if report.pairs.is_empty() {
        return vec!["no device is in both runs".to_owned()];
    }
    report.pairs.iter().take(PAIRS).map(|pair| format!("{}{}", title(pair), pair.headline)).collect()
}

/// The devices that are in one run only, and the limits of the comparison.
pub(crate) fn remarks(report: &DiffReport) -> Vec<String> {
    let only = |one: &UnpairedDevice| {
        let whose = device_text(one.rank, one.pid, one.device);
        format!("only in {}: {whose}, peak {}", one.run.to_uppercase(), size_text(one.peak_bytes))
    };
    let mut remarks: Vec<String> = report.unpaired.iter().take(PAIRS).map(only).collect();
    if report.unpaired.len() > PAIRS {
        remarks.push(format!("{} more devices are in one run only", report.unpaired.len() - PAIRS));
    }
    remarks.extend(report.notes.iter().cloned());
    remarks
}

/// How the lines with another number in B were matched. `None` if there are none.
pub(crate) fn moved_lines(pair: &DevicePair) -> Option<String> {
    let (moved, text) = (pair.moved_lines, pair.moved_lines_by_text);
    let rest = if text == moved {
        "by the text of both sources".to_owned()
    } else {
        format!(
            "{} by the text of both sources, the others by what they call and their position in the function",
            count_text(text)
        )
    };
    (moved > 0).then(|| format!("{} lines have another number in B and were matched: {rest}", count_text(moved)))
}

pub(crate) fn name(run: &DiffRun) -> String {
    let step = run.step.map(|step| format!(", step {step}")).unwrap_or_default();
    format!("{}{step}", run.path)
}

/// The device of a pair: `rank 0, GPU 0: `.
pub(crate) fn title(pair: &DevicePair) -> String {
    let (a, b) = (&pair.a, &pair.b);
    let whose = match (a.rank, b.rank) {
        (Some(rank), Some(other)) if rank == other => format!("rank {rank}, "),
        _ => String::new(),
    };
    let device = |device: i16| if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") };
    let devices =
        if a.device == b.device { device(a.device) } else { format!("{} and {}", device(a.device), device(b.device)) };
    format!("{whose}{devices}: ")
}

impl TextReport {
    fn pair(&mut self, pair: &DevicePair) {
        let are_servers = !pair.by_server_part.is_empty();
        for (name, peak) in [("A", &pair.a), ("B", &pair.b)] {
            let step = peak.step.map_or_else(|| "before the first step".to_owned(), |step| format!("step {step}"));
            // A server has no steps.
            let when = if are_servers { String::new() } else { format!("{step}, {}, ", peak.phase.name()) };
            let text = format!(
                "  {name}  {:>9}  {when}reserved peak {}  ",
                size_text(peak.totals.allocated_bytes),
                size_text(peak.reserved_peak_bytes)
            );
            let location = if peak.location.is_empty() { "no stack" } else { &peak.location };
            let location = location_in(location, self.width.saturating_sub(columns(&text)));
            self.line(format!("{text}{location}"));
        }
        if pair.result == DiffResult::Same {
            return;
        }
        let parts = pair.by_server_part.iter().map(|row| {
            (&row.change, row.part.map_or_else(|| "without a recorded event".to_owned(), |part| part.name().to_owned()))
        });
        self.changes("Part", pair, parts.collect());
        let stages = pair.by_stage.iter().map(|row| {
            (&row.change, row.stage.map_or_else(|| "in no stage".to_owned(), |stage| stage.name().to_owned()))
        });
        self.changes("Allocated in stage", pair, stages.collect());
        let categories = pair.by_category.iter().map(|row| {
            (&row.change, row.category.map_or_else(|| "without a recorded event".to_owned(), |c| c.plural().to_owned()))
        });
        self.changes("Category", pair, categories.collect());
        let custom = pair.by_custom_category.iter().map(|row| {
            let name = row.custom_category.as_deref().unwrap_or(NO_CUSTOM_CATEGORY);
            (&row.change, name.to_owned())
        });
        self.changes("Custom category", pair, custom.collect());
        let phases = pair.by_phase.iter().map(|row| {
            (&row.change, row.phase.map_or_else(|| "without a recorded event".to_owned(), |p| p.name().to_owned()))
        });
        if !are_servers {
            self.changes("Allocated in phase", pair, phases.collect());
        }
        let lines = pair.by_line.iter().map(|row| (&row.change, line_what(row)));
        self.changes("Line", pair, lines.collect());
        let stacks = pair.by_stack.iter().filter(|row| !row.frames.is_empty()).map(|row| {
            let blocks = match (row.change.a_blocks, row.change.b_blocks) {
                (a, b) if a == b => format!("{} blocks", count_text(a)),
                (a, b) => format!("{} -> {} blocks", count_text(a), count_text(b)),
            };
            (&row.change, format!("{}, {blocks}", row.location))
        });
        self.changes(STACK, pair, stacks.collect());
        let modules = pair.by_module.iter().map(|row| {
            (
                &row.change,
                match row.path.as_deref() {
                    None => "in no module".to_owned(),
                    Some("") => "the model itself".to_owned(),
                    Some(path) => path.to_owned(),
                },
            )
        });
        self.changes("Module", pair, modules.collect());
        if let Some(remark) = moved_lines(pair) {
            self.blank();
            self.note(&remark);
        }
    }

    /// Adds a table of the changes larger than noise.
    fn changes(&mut self, what: &str, pair: &DevicePair, rows: Vec<(&Change, String)>) {
        let noise = pair.noise_bytes;
        let changed = |change: &Change| change.difference_bytes.unsigned_abs() > noise;
        let mut shown: Vec<&(&Change, String)> = rows.iter().filter(|(change, _)| changed(change)).collect();
        if shown.is_empty() {
            return;
        }
        // A truncated table keeps both ends: the largest growth and the largest decreases.
        if shown.len() > ROWS {
            let half = ROWS / 2;
            let shrank = shown.iter().filter(|(change, _)| change.difference_bytes < 0).count().min(half);
            let grew = ROWS - shrank;
            shown = shown[..grew].iter().chain(&shown[shown.len() - shrank..]).copied().collect();
        }
        let rest = pair.difference_bytes - shown.iter().map(|(change, _)| change.difference_bytes).sum::<i64>();
        let others = rows.iter().filter(|(change, _)| change.difference_bytes != 0).count() - shown.len();
        let mut table =
            Table::new(&[("Difference", Align::Right), ("A", Align::Right), ("B", Align::Right), (what, Align::Left)]);
        for (change, text) in shown {
            table.row(vec![
                signed_size_text(change.difference_bytes),
                size_text(change.a_bytes),
                size_text(change.b_bytes),
                text.clone(),
            ]);
        }
        if others > 0 && what != STACK {
            table.row(vec![
                signed_size_text(rest),
                String::new(),
                String::new(),
                if others == 1 { "1 other".to_owned() } else { format!("{} others", count_text(others as u64)) },
            ]);
        }
        self.blank();
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
    }
}
