//! The HTML report: one page without network access. It contains the summary, every block of the run with its lifetime,
//! and a script that draws them (`web/`).
//!
//! Everything that a program can name is data: compressed, encoded as base64, and set as text by the script. Where
//! scripts do not run, the page shows the end-of-run summary.

use std::io::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use base64::write::EncoderWriter;
use flate2::Compression;
use flate2::write::ZlibEncoder;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_output::{PageDataOptions, Selection, SourceAccess, Window, page_data};
use memtrace_summary::{ProcessSummary, Progress, Summary, is_library, process_name};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::markup::Text;
use crate::parts::run_title;
use crate::style::{TextOptions, ToText};
use crate::verdict::verdict_lines;

/// The built script and style sheet. `scripts/web --check` proves that they are current.
const SCRIPT: &str = include_str!("../../../web/dist/report.js");
const STYLE: &str = include_str!("../../../web/dist/report.css");

/// The maximum number of processes shown, in the order of the summary.
const SHOWN: usize = 8;
/// A page of at most this many events has every block. A larger one has the largest blocks, up to [`MAX_BLOCKS`].
const COMPLETE_EVENTS: u64 = 2_000_000;
const MAX_BLOCKS: u64 = 1_000_000;
/// The width of the text for browsers without scripts, in columns.
const WIDTH: usize = 100;

/// What the page shows.
#[derive(Clone, Debug)]
pub struct HtmlOptions {
    /// Only this device; -1 is the CPU.
    pub device: Option<i16>,
    /// The source files that may be quoted.
    pub sources: SourceAccess,
    /// For each process, the part of the recording that the timeline shows first. Without windows, the whole run.
    pub windows: Vec<Window>,
}

/// Writes the page about `processes` of the run that `summary` describes.
///
/// # Errors
///
/// The errors of `out`. [`Error::EmptyWindow`] if a process has no events of the device.
pub fn html_report(
    summary: &Summary,
    processes: &[&Process],
    options: &HtmlOptions,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<()> {
    let (summary, left_out) = restrict(summary, processes, options.device);
    let shown: Vec<&Process> = summary
        .processes
        .iter()
        .take(SHOWN)
        .filter_map(|one| processes.iter().find(|process| describes(one, process)).copied())
        .collect();
    if let Some(device) = options.device {
        let selection = Selection { device: Some(device), ..Selection::default() };
        shown.iter().try_for_each(|process| Window::of(process, &selection, &mut |_| {}).map(drop))?;
    }
    let window_of = |shown: &&Process| {
        let place = processes.iter().position(|process| std::ptr::eq(*process, *shown))?;
        options.windows.get(place)?.bounds()
    };
    let cannot = || Error::io("cannot write the page");
    write_head(&summary, out).map_err(cannot())?;
    let page = json!({
        "title": run_title(&summary),
        "verdict": verdict_lines(&summary),
        "only": left_out.then(|| selection_text(&summary, options.device)),
        "windows": shown.iter().map(window_of).collect::<Vec<_>>(),
        "processes_left_out": summary.processes.len() - shown.len(),
        "memtrace_version": env!("CARGO_PKG_VERSION"),
    });
    write_summary(&summary, &page, out).map_err(cannot())?;
    let events: u64 = shown.iter().map(|process| process.recording().event_count()).sum();
    for (number, process) in shown.into_iter().enumerate() {
        let total = process.recording().event_count();
        let share = |most: u64| (u128::from(most) * u128::from(total) / u128::from(events.max(1))) as u64;
        let marks = marks(&summary, process);
        let data = PageDataOptions {
            device: options.device,
            max_blocks: (events > COMPLETE_EVENTS).then(|| share(MAX_BLOCKS)),
            marks: &marks,
            is_library: &|frame| is_library(&frame.filename),
            sources: options.sources.clone(),
        };
        write!(out, "<script type=\"application/octet-stream\" id=\"process-{number}\">").map_err(cannot())?;
        let what = "writing the HTML report";
        let mut encoder = EncoderWriter::new(&mut *out, &STANDARD);
        page_data(process, &data, &mut encoder, &mut |done| progress(Progress { what, done, total }))?;
        encoder.finish().map_err(cannot())?;
        drop(encoder);
        out.write_all(b"</script>\n").map_err(cannot())?;
    }
    write!(out, "<script>{SCRIPT}</script>\n</body></html>\n").and_then(|()| out.flush()).map_err(cannot())
}

/// The value of a policy that allows exactly this inline text.
fn hash(text: &str) -> String {
    format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text.as_bytes())))
}

/// Writes everything before the data: the policy, the style sheet, and the text for browsers without scripts.
fn write_head(summary: &Summary, out: &mut dyn Write) -> io::Result<()> {
    let title = format!("memtrace: {}", run_title(summary));
    let text = summary.to_text(&TextOptions { width: WIDTH, ..TextOptions::default() });
    let head = maud::html! {
        (maud::DOCTYPE) "\n"
        (maud::PreEscaped("<html lang=\"en\"><head>"))
        meta charset="utf-8"; "\n"
        meta name="viewport" content="width=device-width, initial-scale=1"; "\n"
        meta http-equiv="Content-Security-Policy" content={
            "default-src 'none'; script-src " (maud::PreEscaped(hash(SCRIPT))) "; style-src " (maud::PreEscaped(hash(STYLE)))
            "; base-uri 'none'; form-action 'none'"
        }; "\n"
        title { (Text(&title)) } "\n"
        style { (maud::PreEscaped(STYLE)) }
        (maud::PreEscaped("</head><body>\n"))
        div #app {
            noscript {
                pre #report {
                    @for line in text.lines() { (Text(line)) "\n" }
                }
            }
        } "\n"
    };
    out.write_all(head.into_string().as_bytes())
}

/// Writes the summary and what the page says about itself.
fn write_summary(summary: &Summary, page: &Value, out: &mut dyn Write) -> io::Result<()> {
    out.write_all(b"<script type=\"application/octet-stream\" id=\"summary\">")?;
    let mut compressed = ZlibEncoder::new(EncoderWriter::new(&mut *out, &STANDARD), Compression::default());
    write!(compressed, "{{\"page\":{page},\"summary\":{}}}", summary.to_json())?;
    compressed.finish()?.finish()?;
    out.write_all(b"</script>\n")
}

/// The events of a process at which the page must know the totals: peaks and out-of-memory errors.
fn marks(summary: &Summary, process: &Process) -> Vec<u64> {
    let devices = summary.processes.iter().filter(|one| describes(one, process)).flat_map(|one| &one.devices);
    devices
        .flat_map(|device| {
            let states = device.ooms.iter().map(|oom| &oom.in_use).chain(&device.peak);
            states.map(|state| state.seq)
        })
        .collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_insight::passes::{Category, Phase};

    #[test]
    fn nothing_in_the_script_ends_its_element() {
        for text in [SCRIPT, STYLE] {
            assert!(!text.contains("</") && !text.contains("<!--"), "an inline script ends at its end tag");
        }
    }

    #[test]
    fn every_category_and_phase_has_a_color() {
        let names = Category::ALL.iter().map(|one| format!("--category-{}:", one.name()));
        let names = names.chain(Phase::ALL.iter().map(|one| format!("--phase-{}:", one.name())));
        names.for_each(|name| assert!(STYLE.contains(&name), "{name}"));
    }

    #[test]
    fn a_hash_is_that_of_the_browsers() {
        // The value that Chromium prints for an inline script with this text.
        assert_eq!(hash("alert(1)"), "'sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI='");
    }
}
