//! The line table as text.

use memtrace_insight::rules::NO_CUSTOM_CATEGORY;
use memtrace_summary::{
    CompileContextAmount, CustomCategoryAmount, FunctionLines, LineFigures, LineRow, LinesReport, count_text,
    device_text, signed_size_text, size_text,
};

use crate::fit::{columns, cut_middle, wrap_words};
use crate::parts::NOT_COMPILED;
use crate::style::{TextOptions, ToText};
use crate::table::{Align, GAP, Table};
use crate::text_report::TextReport;

/// The maximum width of running text. Tables can be wider.
const WIDEST_TEXT: usize = 100;
/// The width that a line of code gets if it fits beside no choice of columns, and is wrapped.
const WRAPPED: usize = 60;
/// The indentation of a table.
const INDENT: usize = 2;

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
            for line in wrap_words(legend, report.width.min(WIDEST_TEXT).saturating_sub(2)) {
                report.line(format!("  {line}"));
            }
        }
        let mut left_out: Vec<&str> = Vec::new();
        for function in &self.functions {
            report.blank();
            report.heading(&title(function));
            let margin = margin(function);
            let shown = columns_beside_code(function, margin, report.width.saturating_sub(INDENT), &mut left_out);
            let mut head: Vec<_> = shown.iter().map(|column| (column.heading, column.align)).collect();
            head.extend([("Line", Align::Right), ("Code", Align::Left)]);
            let mut table = Table::of_code(&head);
            for line in &function.lines {
                let mut cells: Vec<String> = shown.iter().map(|column| column.text(line)).collect();
                cells.extend([line.line.to_string(), code(line, margin).to_owned()]);
                table.row(cells);
            }
            report.lines.extend(table.lines(INDENT, report.width, report.style));
        }
        report.blank();
        if !left_out.is_empty() {
            report.note(&format!("no room beside the code for {}: see --html or --json", left_out.join(", ")));
        }
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

/// How a cell gets its text.
enum Text {
    OfFigures(fn(&LineFigures) -> String),
    OfLine(fn(&LineRow) -> String),
}

/// A column left of the code.
struct Column {
    heading: &'static str,
    align: Align,
    text: Text,
    /// The columns with the highest numbers are left out first, where the code needs their width. 0 always stays.
    gives_way: u8,
}

impl Column {
    const fn figure(heading: &'static str, gives_way: u8, text: fn(&LineFigures) -> String) -> Column {
        Column { heading, align: Align::Right, text: Text::OfFigures(text), gives_way }
    }

    /// A column that says what the blocks of a line are.
    const fn kind(heading: &'static str, gives_way: u8, text: fn(&LineRow) -> String) -> Column {
        Column { heading, align: Align::Left, text: Text::OfLine(text), gives_way }
    }

    fn text(&self, line: &LineRow) -> String {
        match self.text {
            Text::OfFigures(text) => line.figures.as_ref().map(text).unwrap_or_default(),
            Text::OfLine(text) => text(line),
        }
    }
}

/// These columns, from the left.
static COLUMNS: [Column; 10] = [
    Column::figure("Active peak", 0, |f| nonzero(f.active_peak_bytes)),
    Column::figure("Reserved peak", 4, |f| nonzero(f.reserved_peak_bytes)),
    Column::figure("Net", 2, |f| signed_size_text(f.net_bytes)),
    Column::figure("Allocated", 1, |f| size_text(f.allocated_bytes)),
    Column::figure("Blocks", 6, |f| count_text(f.allocations)),
    Column::figure("Times", 5, |f| if f.times > 0 { count_text(f.times) } else { String::new() }),
    Column::figure("Backward", 3, |f| nonzero(f.backward_bytes)),
    Column::kind("Largest tensor", 9, |line| {
        let Some(tensor) = &line.largest_tensor else { return String::new() };
        let shape = tensor.shape.as_ref().map(|shape| format!(" {shape}")).unwrap_or_default();
        let more = match tensor.named_blocks {
            0 | 1 => String::new(),
            count => format!(", {} more", count_text(count - 1)),
        };
        format!("{}{shape}{more}", cut_middle(&tensor.name, LONGEST_NAME))
    }),
    Column::kind("Custom categories", 7, |line| {
        let name = |one: &CustomCategoryAmount| (one.custom_category.clone(), one.bytes);
        kind_text(line.custom_categories.iter().map(name), NO_CUSTOM_CATEGORY)
    }),
    Column::kind("Compile contexts", 8, |line| {
        let name = |one: &CompileContextAmount| (one.compile_context.clone(), one.bytes);
        kind_text(line.compile_contexts.iter().map(name), NOT_COMPILED)
    }),
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

/// The code of a line, without the common indentation of its function.
fn code(line: &LineRow, margin: usize) -> &str {
    line.text.as_deref().and_then(|text| text.get(margin..)).unwrap_or_default()
}

/// The columns that a function has texts for and that leave its code whole. Adds the headings of the other columns to
/// `left_out`.
fn columns_beside_code(
    function: &FunctionLines,
    margin: usize,
    width: usize,
    left_out: &mut Vec<&'static str>,
) -> Vec<&'static Column> {
    let texts =
        |column: &Column| function.lines.iter().map(|line| columns(&column.text(line))).max().filter(|most| *most > 0);
    let with_width = |column: &'static Column| Some((column, texts(column)?.max(columns(column.heading)) + GAP));
    let mut shown: Vec<(&'static Column, usize)> = COLUMNS.iter().filter_map(with_width).collect();
    let line_number =
        function.lines.iter().map(|line| line.line.to_string().len()).max().unwrap_or(0).max("Line".len());
    let room = width.saturating_sub(line_number + GAP);
    let fewest: usize = shown.iter().filter(|(column, _)| column.gives_way == 0).map(|(_, width)| width).sum();
    let widest = room.saturating_sub(fewest);
    let widths = function.lines.iter().map(|line| columns(code(line, margin)));
    let needed = widths.map(|width| if width > widest { widest.min(WRAPPED) } else { width }).max();
    let needed = needed.unwrap_or(0).max("Code".len());
    while shown.iter().map(|(_, width)| width).sum::<usize>() + needed > room {
        let Some(at) = (0..shown.len()).max_by_key(|at| shown[*at].0.gives_way) else { break };
        if shown[at].0.gives_way == 0 {
            break;
        }
        let (column, _) = shown.remove(at);
        if !left_out.contains(&column.heading) {
            left_out.push(column.heading);
        }
    }
    shown.into_iter().map(|(column, _)| column).collect()
}

fn nonzero(bytes: u64) -> String {
    if bytes > 0 { size_text(bytes) } else { String::new() }
}

/// The allocations of a line, by kind: `attention 1.20 GiB, none of the rules 3.00 MiB`. `rest` is the name of
/// blocks without one.
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
