//! The report as an HTML page that loads nothing. It shows the end-of-run summary first, then pictures of each device,
//! then every section in full.
//!
//! Its text is that of the end-of-run summary and of the sections, so HTML, terminal and JSON always agree.

use std::fmt::Write as _;
use std::io::Write;

use super::finish::Progress;
use super::sections::{SECTIONS, Section};
use super::summary::{ProcessSummary, Summary};
use super::text::{TextOptions, called, device_text, process_name};
use super::units::{count_text, size_text};
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_input::printable;
use memtrace_output::{PICTURE_STYLE, Picture, Selection, Window, pictures};

/// The maximum number of processes shown in full, in the order of the summary.
const TOLD: usize = 8;
/// The width of the text in columns.
const WIDTH: usize = 132;
/// The order of the sections, and which of them are open.
const ORDER: [(&str, bool); SECTIONS.len()] = [
    ("oom", true),
    ("findings", true),
    ("peak", true),
    ("phases", true),
    ("fragmentation", true),
    ("outside", false),
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
pub fn html_page(
    summary: &Summary,
    processes: &[&Process],
    device: Option<i16>,
    mut out: impl Write,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<()> {
    let (summary, left_out) = narrowed(summary, processes, device);
    let layout = TextOptions { width: WIDTH, colour: true };
    let text = summary.to_text(&layout);
    let (headline, answer) = text.split_once('\n').unwrap_or((&text, ""));
    let called = printable::html(&called(&summary));
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>memtrace: {called}</title>\n<style>{STYLE} {}</style></head><body>\n<h1>{}</h1>\n",
        PICTURE_STYLE.join(" "),
        marked(headline)
    );
    // Writing to a string cannot fail.
    let mut put = |args: std::fmt::Arguments<'_>| {
        let _ = page.write_fmt(args);
    };
    if left_out {
        put(format_args!("<p class=\"dim\">only {} of this run</p>\n", printable::html(&named(&summary, device))));
    }
    put(format_args!("<pre id=\"answer\">{}</pre>\n", marked(answer)));
    let several = summary.processes.len() > 1;
    let told: Vec<(usize, &ProcessSummary)> = summary.processes.iter().take(TOLD).enumerate().collect();
    if several {
        let links = told.iter().map(|(i, p)| format!("<a href=\"#p{i}\">{}</a>", process_name(p)));
        put(format_args!("<nav>{}</nav>\n", links.collect::<String>()));
    }
    for (i, one) in told {
        let process = processes.iter().find(|process| is(one, process));
        let name = several.then(|| process_name(one));
        put(format_args!("<section id=\"p{i}\">\n"));
        if let Some(process) = process {
            for picture in drawn(process, device, progress)? {
                let at = device_text(one.rank, one.pid, picture.device);
                put(format_args!("<h2>{at}</h2>\n{}", picture.timeline));
                put(format_args!("<h3>What was allocated at the peak, by call stack</h3>\n{}", picture.flame));
            }
        }
        for (section, open) in ORDER.iter().filter_map(|(name, open)| Some((Section::named(name)?, *open))) {
            if section.is_about(one) {
                let text = section.of_process(one, name.as_deref(), &layout);
                let open = if open { " open" } else { "" };
                put(format_args!(
                    "<details{open}><summary>{}</summary><pre>{}</pre></details>\n",
                    section.tells,
                    marked(text.trim_start_matches('\n'))
                ));
            }
        }
        put(format_args!("</section>\n"));
    }
    if summary.processes.len() > TOLD {
        let more = count_text((summary.processes.len() - TOLD) as u64);
        put(format_args!(
            "<p>{more} more processes, with lower peaks: memtrace export --to html with --rank or --pid tells of each</p>\n"
        ));
    }
    put(format_args!("</body></html>\n"));
    out.write_all(page.as_bytes()).and_then(|()| out.flush()).map_err(Error::io("cannot write the page"))
}

/// The pictures of a process.
fn drawn(process: &Process, device: Option<i16>, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Vec<Picture>> {
    let what = "drawing the report";
    let total = process.recording().event_count();
    let mut heard = |done| progress(Progress { what, done, total });
    let window = Window::of(process, &Selection { device, ..Selection::default() }, &mut heard)?;
    Ok(pictures(process, &window, &size_text, &mut heard))
}

/// Whether a summary describes this process.
fn is(summary: &ProcessSummary, process: &Process) -> bool {
    process.path().file_name().is_some_and(|name| name.to_string_lossy() == summary.trace)
}

/// The summary of these processes and of this device alone, and whether anything was left out.
fn narrowed(summary: &Summary, processes: &[&Process], device: Option<i16>) -> (Summary, bool) {
    let mut narrow = summary.clone();
    narrow.processes.retain(|one| processes.iter().any(|process| is(one, process)));
    for process in &mut narrow.processes {
        process.devices.retain(|one| device.is_none_or(|device| one.device == device));
        process.findings.retain(|finding| device.is_none_or(|device| finding.device == device));
    }
    let devices = |summary: &Summary| summary.processes.iter().map(|process| process.devices.len()).sum::<usize>();
    let left_out = narrow.processes.len() < summary.processes.len() || devices(&narrow) < devices(summary);
    (narrow, left_out)
}

/// Formats processes and device: `rank 3, GPU 0`.
fn named(summary: &Summary, device: Option<i16>) -> String {
    let mut names: Vec<String> = summary.processes.iter().take(TOLD).map(process_name).collect();
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
    fn every_section_has_its_place() {
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
