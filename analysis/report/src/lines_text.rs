//! The line table as text.

use memtrace_insight::rules::NO_CUSTOM_CATEGORY;
use memtrace_summary::{
    CompileContextAmount, CustomCategoryAmount, FunctionLines, LineFigures, LineRow, LinesReport, count_text,
    device_text, signed_size_text, size_text,
};

use crate::fit::{cut_middle, wrap_words};
use crate::parts::NOT_COMPILED;
use crate::style::{TextOptions, ToText};
use crate::table::{Align, Table};
use crate::text_report::TextReport;

/// The maximum width of the code column, if the report is not narrower.
const WIDEST: usize = 160;

/// The legend of the figures.
pub(crate) const LEGEND: [&str; 3] = [
    "A line is current from an event (an allocation or a free) in it, or in a function that it calls, to the next \
     event. The peaks are the maxima of active and reserved bytes in that time.",
    "Times: how often the line was seen to begin; it ran at least that often. Net: bytes allocated minus bytes freed. \
     A line without figures had no event.",
    "Backward: bytes that the backward pass of the line's calls allocated. They also count for the line that called \
     backward(), and in no other column of this line.",
];

impl ToText for LinesReport {
    /// The table for a terminal.
    fn to_text(&self, options: &TextOptions) -> String {
        let mut report = TextReport::new(options);
        report.heading(&report_title(self));
        for legend in LEGEND {
            for line in wrap_words(legend, report.width.saturating_sub(2)) {
                report.line(format!("  {line}"));
            }
        }
        for function in &self.functions {
            report.blank();
            report.heading(&title(function));
            let margin = margin(function);
            let backward = function.lines.iter().any(|line| line.figures.is_some_and(|f| f.backward_allocations > 0));
            let mut head = vec![
                ("Active peak", Align::Right),
                ("Reserved peak", Align::Right),
                ("Net", Align::Right),
                ("Allocated", Align::Right),
                ("Blocks", Align::Right),
                ("Times", Align::Right),
            ];
            head.extend(backward.then_some(("Backward", Align::Right)));
            let kinds = kinds_of(function);
            head.extend(kinds.iter().map(|kind| (kind.heading, Align::Left)));
            head.extend([("Line", Align::Right), ("Code", Align::Left)]);
            let mut table = Table::verbatim(&head);
            for line in &function.lines {
                let mut cells = cells(line.figures.as_ref());
                cells.truncate(6 + usize::from(backward));
                cells.extend(kinds.iter().map(|kind| (kind.text)(line)));
                cells.push(line.line.to_string());
                cells.push(line.text.as_deref().and_then(|text| text.get(margin..)).unwrap_or_default().to_owned());
                table.row(cells);
            }
            report.lines.extend(table.lines(2, report.width.max(WIDEST), report.style));
        }
        report.blank();
        for note in notes(self) {
            report.note(&note);
        }
        report.text()
    }
}

fn report_title(report: &LinesReport) -> String {
    format!(
        "memtrace lines {}    {}    active peak {}, reserved peak {}",
        report.run,
        device_text(report.rank, report.pid, report.device),
        size_text(report.active_peak_bytes),
        size_text(report.reserved_peak_bytes)
    )
}

pub(crate) fn notes(report: &LinesReport) -> Vec<String> {
    let mut notes = report.notes.clone();
    if report.functions_left_out > 0 {
        let count = count_text(report.functions_left_out);
        notes.push(format!("{count} more functions with lower peaks: use --top, --function or --file"));
    }
    if !report.other_devices.is_empty() {
        let name = |other: &memtrace_summary::OtherDevice| {
            format!("{} ({})", device_text(other.rank, other.pid, other.device), size_text(other.active_peak_bytes))
        };
        let mut names: Vec<String> = report.other_devices.iter().take(8).map(name).collect();
        if report.other_devices.len() > names.len() {
            names.push(format!("{} more", report.other_devices.len() - names.len()));
        }
        notes.push(format!("other devices, with --rank, --pid or --device: {}", names.join(", ")));
    }
    notes
}

/// A column that says what the blocks of a line are.
struct Kind {
    heading: &'static str,
    text: fn(&LineRow) -> String,
}

/// These columns. A function has those for which it has texts.
static KINDS: [Kind; 3] = [
    Kind {
        heading: "Largest tensor",
        text: |line| {
            let Some(tensor) = &line.largest_tensor else { return String::new() };
            let shape = tensor.shape.as_ref().map(|shape| format!(" {shape}")).unwrap_or_default();
            let more = match tensor.named_blocks {
                0 | 1 => String::new(),
                count => format!(", {} more", count_text(count - 1)),
            };
            format!("{}{shape}{more}", cut_middle(&tensor.name, LONGEST_NAME))
        },
    },
    Kind {
        heading: "Custom categories",
        text: |line| {
            let name = |one: &CustomCategoryAmount| (one.custom_category.clone(), one.bytes);
            kind_text(line.custom_categories.iter().map(name), NO_CUSTOM_CATEGORY)
        },
    },
    Kind {
        heading: "Compile contexts",
        text: |line| {
            let name = |one: &CompileContextAmount| (one.compile_context.clone(), one.bytes);
            kind_text(line.compile_contexts.iter().map(name), NOT_COMPILED)
        },
    },
];
/// The maximum width of a tensor name in columns.
const LONGEST_NAME: usize = 32;
/// The maximum number of kinds of blocks shown of one line.
const LISTED_KINDS: usize = 3;
fn title(function: &FunctionLines) -> String {
    let location = match function.first_line {
        0 => function.filename.clone(),
        line => format!("{}:{line}", function.filename),
    };
    format!("{}    {location}    active peak {}", function.function, size_text(function.active_peak_bytes))
}

/// The common indentation of a function's lines, in characters.
fn margin(function: &FunctionLines) -> usize {
    let texts = function.lines.iter().filter_map(|line| line.text.as_deref()).filter(|text| !text.trim().is_empty());
    texts.map(|text| text.len() - text.trim_start_matches([' ', '\t']).len()).min().unwrap_or(0)
}

/// The seven figures of a line.
fn cells(figures: Option<&LineFigures>) -> Vec<String> {
    let Some(f) = figures else { return vec![String::new(); 7] };
    let some = |bytes: u64| if bytes > 0 { size_text(bytes) } else { String::new() };
    vec![
        some(f.active_peak_bytes),
        some(f.reserved_peak_bytes),
        signed_size_text(f.net_bytes),
        size_text(f.allocated_bytes),
        count_text(f.allocations),
        if f.times > 0 { count_text(f.times) } else { String::new() },
        some(f.backward_bytes),
    ]
}

/// The columns of [`KINDS`] that a function has.
fn kinds_of(function: &FunctionLines) -> Vec<&'static Kind> {
    KINDS.iter().filter(|kind| function.lines.iter().any(|line| !(kind.text)(line).is_empty())).collect()
}

/// What a line allocated, by kind: `attention 1.20 GiB, none of the rules 3.00 MiB`. `rest` names what has no name.
fn kind_text(all: impl Iterator<Item = (Option<String>, u64)>, rest: &str) -> String {
    let mut names: Vec<String> =
        all.map(|(name, bytes)| format!("{} {}", name.as_deref().unwrap_or(rest), size_text(bytes))).collect();
    if names.len() > LISTED_KINDS {
        let more = names.len() - LISTED_KINDS;
        names.truncate(LISTED_KINDS);
        names.push(format!("{more} more"));
    }
    names.join(", ")
}
