//! The report as an HTML page that loads nothing. The page shows the end-of-run summary first, then pictures of each device,
//! then every section in full.
//!
//! Its text is that of the end-of-run summary and of the sections, so HTML, terminal and JSON always agree.

use std::io::Write;

use maud::{Markup, PreEscaped, html};
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_output::{CHART_STYLES, DeviceCharts, Selection, Window, device_charts};
use memtrace_summary::{ProcessSummary, Progress, Summary, count_text, device_text, process_name, size_text};

use crate::markup::{Text, page};
use crate::parts::run_title;
use crate::sections::{SECTIONS, Section};
use crate::style::{TextOptions, ToText};

/// The maximum number of processes shown in full, in the order of the summary.
const SHOWN: usize = 8;
/// The width of the text in columns.
const WIDTH: usize = 132;
/// The order of the sections, and which of them are open.
const ORDER: [(&str, bool); SECTIONS.len()] = [
    ("oom", true),
    ("issues", true),
    ("peak", true),
    ("phases", true),
    ("holders", true),
    ("fragmentation", true),
    ("outside-pytorch", false),
    ("memory", false),
    ("rules", false),
];

const STYLE: &str = ":root { color-scheme: light; } body { font: 14px system-ui, sans-serif; margin: 20px; color: #222; background: #fff; } \
    h1 { font: bold 16px ui-monospace, monospace; white-space: pre-wrap; } h2 { font-size: 17px; margin: 28px 0 8px; } h3 { font-size: 14px; } \
    summary { font-size: 15px; font-weight: bold; cursor: pointer; margin: 12px 0 4px; } nav a { margin-right: 14px; } \
    pre { font: 13px/1.35 ui-monospace, monospace; overflow-x: auto; margin: 6px 0; } .dim { color: #666; } \
    .bold { font-weight: bold; } .alarm { color: #b00020; font-weight: bold; } td, th { padding: 1px 8px; font-weight: normal; text-align: left; }";

/// Writes the page about `processes` of the run that `summary` describes. `device` limits it to one device.
///
/// # Errors
///
/// The errors of `out`. [`Error::EmptyWindow`] if a process has no events of the device.
pub fn html_report(
    summary: &Summary,
    processes: &[&Process],
    device: Option<i16>,
    mut out: impl Write,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<()> {
    let (summary, left_out) = restrict(summary, processes, device);
    let several = summary.processes.len() > 1;
    let shown = &summary.processes[..summary.processes.len().min(SHOWN)];
    let mut charts = Vec::new();
    for one in shown {
        let process = processes.iter().find(|process| describes(one, process));
        charts.push(process.map(|process| draw(process, device, progress)).transpose()?.unwrap_or_default());
    }
    let layout = TextOptions { width: WIDTH, color: true, blocks: true, ..TextOptions::default() };
    let text = summary.to_text(&layout);
    let (headline, report) = text.split_once('\n').unwrap_or((&text, ""));
    let more = summary.processes.len() - shown.len();
    let body = html! {
        h1 { (marked(headline)) } "\n"
        @if left_out {
            p.dim { "only " (Text(selection_text(&summary, device))) " of this run" } "\n"
        }
        pre #report { (marked(report)) } "\n"
        @if several {
            nav { @for (i, one) in shown.iter().enumerate() { a href={ "#p" (i) } { (process_name(one)) } } } "\n"
        }
        @for (i, (one, charts)) in shown.iter().zip(&charts).enumerate() {
            section id={ "p" (i) } { "\n"
                @for chart in charts { (device_markup(one, chart)) }
                @let name = several.then(|| process_name(one));
                @for (section, open) in ORDER.iter().filter_map(|(name, open)| Some((Section::named(name)?, *open))) {
                    @if section.has_content(one) {
                        (section_markup(section, open, &section.of_process(one, name.as_deref(), &layout)))
                    }
                }
            } "\n"
        }
        @if more > 0 {
            p {
                (count_text(more as u64))
                " more processes, with lower peaks: memtrace export --to html shows one with --rank or --pid"
            } "\n"
        }
    };
    let title = format!("memtrace: {}", run_title(&summary));
    let page = page(&title, &[&[STYLE][..], &CHART_STYLES].concat().join(" "), &body).into_string();
    out.write_all(page.as_bytes()).and_then(|()| out.flush()).map_err(Error::io("cannot write the page"))
}

/// The charts of a device of a process.
fn device_markup(process: &ProcessSummary, charts: &DeviceCharts) -> Markup {
    html! {
        h2 { (device_text(process.rank, process.pid, charts.device)) } "\n"
        (PreEscaped(&charts.timeline))
        h3 { "In use at the peak, by call stack" } "\n"
        (PreEscaped(&charts.flame))
    }
}

/// A section whose text can be folded away.
fn section_markup(section: &Section, open: bool, text: &str) -> Markup {
    html! {
        details open[open] {
            summary title=(section.description) { (section.title) }
            pre { (marked(text.trim_start_matches('\n'))) }
        } "\n"
    }
}

/// Draws the pictures of a process.
fn draw(process: &Process, device: Option<i16>, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Vec<DeviceCharts>> {
    let what = "drawing the report";
    let total = process.recording().event_count();
    let mut on_progress = |done| progress(Progress { what, done, total });
    let window = Window::of(process, &Selection { device, ..Selection::default() }, &mut on_progress)?;
    Ok(device_charts(process, &window, &size_text, &mut on_progress))
}

/// Whether a summary describes this process.
fn describes(summary: &ProcessSummary, process: &Process) -> bool {
    process.path().file_name().is_some_and(|name| name.to_string_lossy() == summary.trace)
}

/// The summary of these processes and of this device alone, and whether anything was left out.
fn restrict(summary: &Summary, processes: &[&Process], device: Option<i16>) -> (Summary, bool) {
    let mut narrow = summary.clone();
    narrow.processes.retain(|one| processes.iter().any(|process| describes(one, process)));
    for process in &mut narrow.processes {
        process.devices.retain(|one| device.is_none_or(|device| one.device == device));
        process.issues.retain(|issue| device.is_none_or(|device| issue.device == device));
    }
    let devices = |summary: &Summary| summary.processes.iter().map(|process| process.devices.len()).sum::<usize>();
    let left_out = narrow.processes.len() < summary.processes.len() || devices(&narrow) < devices(summary);
    (narrow, left_out)
}

/// Formats processes and device: `rank 3, GPU 0`.
fn selection_text(summary: &Summary, device: Option<i16>) -> String {
    let mut names: Vec<String> = summary.processes.iter().take(SHOWN).map(process_name).collect();
    names.extend(device.map(|device| if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") }));
    names.join(", ")
}

/// Converts colored text to HTML: ANSI sequences become spans.
fn marked(text: &str) -> Markup {
    html! {
        @for (i, line) in text.lines().enumerate() {
            @if i > 0 { "\n" }
            @for (class, piece) in colored_pieces(line) {
                @match class {
                    Some(class) => span class=(class) { (Text(piece)) },
                    None => (Text(piece)),
                }
            }
        }
    }
}

/// The pieces of a line between its ANSI sequences, each with the class of the sequence before it.
fn colored_pieces(line: &str) -> impl Iterator<Item = (Option<&'static str>, &str)> {
    line.split('\x1b').enumerate().map(|(i, piece)| match piece.split_once('m').filter(|_| i > 0) {
        Some(("[1", rest)) => (Some("bold"), rest),
        Some(("[2", rest)) => (Some("dim"), rest),
        Some(("[1;31", rest)) => (Some("alarm"), rest),
        Some((_, rest)) => (None, rest),
        None => (None, piece),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_section_is_in_the_order() {
        for section in SECTIONS {
            assert!(ORDER.iter().any(|(name, _)| *name == section.name), "{}", section.name);
        }
    }

    #[test]
    fn marks_are_closed_and_text_is_text() {
        assert_eq!(
            marked("\x1b[1;31mOOM\x1b[0m a<b \x1b[2mx\ny").into_string(),
            "<span class=\"alarm\">OOM</span> a&lt;b <span class=\"dim\">x</span>\ny"
        );
    }
}
