//! The report as an HTML page that loads nothing. The page shows the end-of-run summary first, then pictures of each device,
//! then every section in full.
//!
//! Its text is that of the end-of-run summary and of the sections, so HTML, terminal and JSON always agree.

use std::fmt::Write as _;
use std::io::Write;

use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_input::printable;
use memtrace_output::{CHART_STYLES, DeviceCharts, Selection, Window, device_charts};
use memtrace_summary::{ProcessSummary, Progress, Summary, count_text, device_text, process_name, size_text};

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
    let layout = TextOptions { width: WIDTH, color: true };
    let text = summary.to_text(&layout);
    let (headline, body) = text.split_once('\n').unwrap_or((&text, ""));
    let title = printable::html(&run_title(&summary));
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>memtrace: {title}</title>\n<style>{STYLE} {}</style></head><body>\n<h1>{}</h1>\n",
        CHART_STYLES.join(" "),
        marked(headline)
    );
    // Writing to a string cannot fail.
    let mut put = |args: std::fmt::Arguments<'_>| {
        let _ = page.write_fmt(args);
    };
    if left_out {
        put(format_args!(
            "<p class=\"dim\">only {} of this run</p>\n",
            printable::html(&selection_text(&summary, device))
        ));
    }
    put(format_args!("<pre id=\"report\">{}</pre>\n", marked(body)));
    let several = summary.processes.len() > 1;
    let shown: Vec<(usize, &ProcessSummary)> = summary.processes.iter().take(SHOWN).enumerate().collect();
    if several {
        let links = shown.iter().map(|(i, p)| format!("<a href=\"#p{i}\">{}</a>", process_name(p)));
        put(format_args!("<nav>{}</nav>\n", links.collect::<String>()));
    }
    for (i, one) in shown {
        let process = processes.iter().find(|process| describes(one, process));
        let name = several.then(|| process_name(one));
        put(format_args!("<section id=\"p{i}\">\n"));
        if let Some(process) = process {
            for picture in draw(process, device, progress)? {
                let at = device_text(one.rank, one.pid, picture.device);
                put(format_args!("<h2>{at}</h2>\n{}", picture.timeline));
                put(format_args!("<h3>In use at the peak, by call stack</h3>\n{}", picture.flame));
            }
        }
        for (section, open) in ORDER.iter().filter_map(|(name, open)| Some((Section::named(name)?, *open))) {
            if section.has_content(one) {
                let text = section.of_process(one, name.as_deref(), &layout);
                let open = if open { " open" } else { "" };
                put(format_args!(
                    "<details{open}><summary title=\"{}\">{}</summary><pre>{}</pre></details>\n",
                    printable::html(section.description),
                    section.title,
                    marked(text.trim_start_matches('\n'))
                ));
            }
        }
        put(format_args!("</section>\n"));
    }
    if summary.processes.len() > SHOWN {
        let more = count_text((summary.processes.len() - SHOWN) as u64);
        put(format_args!(
            "<p>{more} more processes, with lower peaks: memtrace export --to html shows one with --rank or --pid</p>\n"
        ));
    }
    put(format_args!("</body></html>\n"));
    out.write_all(page.as_bytes()).and_then(|()| out.flush()).map_err(Error::io("cannot write the page"))
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

/// Converts colored text to HTML. ANSI sequences become spans; everything else is escaped text.
fn marked(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 256);
    let mut open = false;
    let close = |open: &mut bool| if std::mem::take(open) { "</span>" } else { "" };
    for (i, line) in text.lines().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        for (j, piece) in line.split('\x1b').enumerate() {
            let (class, rest) = match piece.split_once('m').filter(|_| j > 0) {
                Some(("[1", rest)) => ("bold", rest),
                Some(("[2", rest)) => ("dim", rest),
                Some(("[1;31", rest)) => ("alarm", rest),
                Some((_, rest)) => ("", rest),
                None => ("", piece),
            };
            if j > 0 {
                out.push_str(close(&mut open));
            }
            if !class.is_empty() {
                let _ = write!(out, "<span class=\"{class}\">");
                open = true;
            }
            out.push_str(&printable::html(rest));
        }
        out.push_str(close(&mut open));
    }
    out
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
            marked("\x1b[1;31mOOM\x1b[0m a<b \x1b[2mx\ny"),
            "<span class=\"alarm\">OOM</span> a&lt;b <span class=\"dim\">x</span>\ny"
        );
    }
}
