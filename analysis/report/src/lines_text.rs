//! The line table as text and as a self-contained HTML page.

use std::fmt::Write as _;

use memtrace_input::printable;
use memtrace_summary::{FunctionLines, LineFigures, LinesReport, count_text, device_text, signed_size_text, size_text};

use crate::style::{TextOptions, ToText};
use crate::table::{Align, Table, cut, wrap_words};
use crate::text_report::TextReport;

/// The maximum width of the code column, if the report is not narrower.
const WIDEST: usize = 160;

/// The legend of the figures.
const LEGEND: [&str; 3] = [
    "A line is current from an event (an allocation or a free) in it, or in a function that it calls, to the next event. The peaks are \
     the maxima of active and reserved bytes in that time.",
    "Times: how often the line was seen to begin; it ran at least that often. Net: bytes allocated minus bytes freed. A line without \
     figures had no event.",
    "Backward: bytes that the backward pass of the line's calls allocated. They also count for the line that called backward(), and in \
     no other column of this line.",
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
            head.extend([("Line", Align::Right), ("Code", Align::Left)]);
            let mut table = Table::verbatim(&head);
            for line in &function.lines {
                let mut cells = cells(line.figures.as_ref());
                cells.truncate(6 + usize::from(backward));
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

fn notes(report: &LinesReport) -> Vec<String> {
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

/// The table as an HTML page that loads nothing.
pub fn lines_html(report: &LinesReport) -> String {
    let title_text = escaped(&report_title(report));
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title_text}</title>\n<style>{STYLE}</style></head><body>\n\
         <h1>{title_text}</h1>\n"
    );
    for legend in LEGEND {
        let _ = writeln!(out, "<p class=\"dim\">{}</p>", escaped(legend));
    }
    for function in &report.functions {
        let _ = writeln!(out, "<h2>{}</h2>\n<table><tr>{}</tr>", escaped(&title(function)), head());
        for line in &function.lines {
            let bar = |bytes: u64, most: u64| {
                let share = bytes as f64 * 100.0 / most.max(1) as f64;
                format!("<td class=\"bar\" style=\"background-size:{share:.1}% 100%\">{}</td>", size_text(bytes))
            };
            let mut row = String::new();
            match &line.figures {
                Some(f) => {
                    row += &bar(f.active_peak_bytes, report.active_peak_bytes);
                    row += &bar(f.reserved_peak_bytes, report.reserved_peak_bytes);
                    for cell in &cells(Some(f))[2..] {
                        let _ = write!(row, "<td>{cell}</td>");
                    }
                }
                None => row += &"<td></td>".repeat(7),
            }
            let text = line.text.as_deref().unwrap_or_default();
            let _ = writeln!(
                out,
                "<tr>{row}<td class=\"dim\">{}</td><td class=\"code\">{}</td></tr>",
                line.line,
                escaped(text)
            );
        }
        out += "</table>\n";
    }
    for note in notes(report) {
        let _ = writeln!(out, "<p>{}</p>", escaped(&note));
    }
    out + "</body></html>\n"
}

const STYLE: &str = "body{font:14px system-ui,sans-serif;margin:20px}h1{font-size:18px}h2{font-size:15px;margin-top:28px}\
table{border-collapse:collapse}td,th{padding:1px 10px;text-align:right;white-space:nowrap}th{color:#666;font-weight:normal}\
.dim{color:#666;margin:2px 0}.code{text-align:left;white-space:pre;font-family:monospace}\
.bar{background:linear-gradient(#bcd2f2,#bcd2f2) no-repeat left}tr:hover{background:#f4f4f4}";

fn head() -> String {
    let names = ["Active peak", "Reserved peak", "Net", "Allocated", "Blocks", "Times", "Backward", "Line", "Code"];
    names.iter().map(|name| format!("<th>{name}</th>")).collect()
}

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

/// Escapes text for HTML, without the control characters that move or hide text.
fn escaped(text: &str) -> String {
    printable::html(&cut(text, 2000))
}
