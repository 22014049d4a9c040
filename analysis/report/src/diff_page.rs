//! The comparison of two runs as text, with the most important result first.

use super::compare::line_what;
use super::diff::{Change, DevicePair, DiffReport, DiffRun, Verdict};
use super::table::{Align, Table, wrap_words};
use super::text::{Page, TextOptions, device_text};
use super::units::{count_text, signed_size_text, size_text};

/// The maximum number of rows of a table.
const ROWS: usize = 10;
/// The maximum number of devices listed. One of them is shown in full.
const PAIRS: usize = 16;

impl DiffReport {
    /// The comparison for a terminal.
    pub fn to_text(&self, options: &TextOptions) -> String {
        let mut page = Page::new(options);
        page.line(format!("memtrace diff    A: {}    B: {}", name(&self.a), name(&self.b)));
        let many = self.pairs.len() > 1;
        for pair in self.pairs.iter().take(PAIRS) {
            page.heading(&format!("{}{}", title(pair), pair.headline));
        }
        if self.pairs.len() > PAIRS {
            page.line(format!("{} more devices that differ less: see --json", self.pairs.len() - PAIRS));
        }
        if self.pairs.is_empty() {
            page.heading("no device is in both: nothing to compare");
        }
        if let Some(pair) = self.pairs.first() {
            if many && pair.verdict != Verdict::Same {
                page.blank();
                page.line(format!("{}in full:", title(pair)));
            }
            page.pair(pair);
        }
        for one in self.unpaired.iter().take(PAIRS) {
            let whose = device_text(one.rank, one.pid, one.device);
            page.note(&format!("only in {}: {whose}, peak {}", one.run.to_uppercase(), size_text(one.peak_bytes)));
        }
        if self.unpaired.len() > PAIRS {
            page.note(&format!("{} more devices are in one run only", self.unpaired.len() - PAIRS));
        }
        self.remarks.iter().for_each(|remark| page.note(remark));
        page.text()
    }
}

fn name(run: &DiffRun) -> String {
    let step = run.step.map(|step| format!(", step {step}")).unwrap_or_default();
    format!("{}{step}", run.path)
}

fn title(pair: &DevicePair) -> String {
    let (a, b) = (&pair.a, &pair.b);
    let whose = match (a.rank, b.rank) {
        (Some(rank), Some(other)) if rank == other => format!("rank {rank}, "),
        _ => String::new(),
    };
    let device = |device: i16| if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") };
    let devices = if a.device == b.device {
        device(a.device)
    } else {
        format!("{} against {}", device(a.device), device(b.device))
    };
    format!("{whose}{devices}: ")
}

impl Page {
    fn note(&mut self, text: &str) {
        for (i, line) in wrap_words(text, self.width.saturating_sub(8)).iter().enumerate() {
            self.line(format!("{}{line}", if i == 0 { "  note  " } else { "        " }));
        }
    }

    fn pair(&mut self, pair: &DevicePair) {
        for (name, moment) in [("A", &pair.a), ("B", &pair.b)] {
            let step = moment.step.map_or_else(|| "before the first step".to_owned(), |step| format!("step {step}"));
            self.line(format!(
                "  {name}  {:>9}  {step}, {}, {}; reserved at most {}",
                size_text(moment.totals.allocated_bytes),
                moment.phase.name(),
                if moment.place.is_empty() { "no stack" } else { &moment.place },
                size_text(moment.reserved_peak_bytes)
            ));
        }
        if pair.verdict == Verdict::Same {
            return;
        }
        let categories = pair.by_category.iter().map(|row| {
            (&row.change, row.category.map_or_else(|| "no event accounts for it".to_owned(), |c| c.plural().to_owned()))
        });
        self.changes("what for", pair, categories.collect());
        let phases = pair.by_phase.iter().map(|row| {
            (&row.change, row.phase.map_or_else(|| "no event accounts for it".to_owned(), |p| p.name().to_owned()))
        });
        self.changes("allocated in", pair, phases.collect());
        let lines = pair.by_line.iter().map(|row| (&row.change, line_what(row)));
        self.changes("line", pair, lines.collect());
        let stacks = pair.by_stack.iter().filter(|row| !row.frames.is_empty()).map(|row| {
            let blocks = match (row.change.a_blocks, row.change.b_blocks) {
                (a, b) if a == b => format!("{} blocks", count_text(a)),
                (a, b) => format!("{} -> {} blocks", count_text(a), count_text(b)),
            };
            (&row.change, format!("{}, {blocks}", row.place))
        });
        self.changes("stack", pair, stacks.collect());
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
        self.changes("module", pair, modules.collect());
        if pair.moved_lines > 0 {
            self.blank();
            let (moved, text) = (pair.moved_lines, pair.moved_lines_by_text);
            let rest = if text == moved {
                "by the text of both sources".to_owned()
            } else {
                format!(
                    "{} by the text of both sources, the others by what they call and their place in the function",
                    count_text(text)
                )
            };
            self.note(&format!("{} lines have another number in B, and were matched: {rest}", count_text(moved)));
        }
    }

    /// Adds a table of the changes larger than noise.
    fn changes(&mut self, what: &str, pair: &DevicePair, rows: Vec<(&Change, String)>) {
        let noise = pair.noise_bytes;
        let changed = |change: &Change| change.difference_bytes.unsigned_abs() > noise;
        let mut told: Vec<&(&Change, String)> = rows.iter().filter(|(change, _)| changed(change)).collect();
        if told.is_empty() {
            return;
        }
        // A truncated table keeps both ends: the largest growth and the largest decreases.
        if told.len() > ROWS {
            let half = ROWS / 2;
            let shrank = told.iter().filter(|(change, _)| change.difference_bytes < 0).count().min(half);
            let grew = ROWS - shrank;
            told = told[..grew].iter().chain(&told[told.len() - shrank..]).copied().collect();
        }
        let rest = pair.difference_bytes - told.iter().map(|(change, _)| change.difference_bytes).sum::<i64>();
        let others = rows.iter().filter(|(change, _)| change.difference_bytes != 0).count() - told.len();
        let mut table =
            Table::new(&[("difference", Align::Right), ("A", Align::Right), ("B", Align::Right), (what, Align::Left)]);
        for (change, text) in told {
            table.row(vec![
                signed_size_text(change.difference_bytes),
                size_text(change.a_bytes),
                size_text(change.b_bytes),
                text.clone(),
            ]);
        }
        if others > 0 && what != "stack" {
            table.row(vec![
                signed_size_text(rest),
                String::new(),
                String::new(),
                format!("{} others", count_text(others as u64)),
            ]);
        }
        self.blank();
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
    }
}
