//! The HTML report: one page without network access. It contains the summary, every block of the run with its lifetime,
//! and a script that draws them (`web/`).
//!
//! Where scripts do not run, the page shows the end-of-run summary.

use std::io::Write;

use memtrace_input::error::Result;
use memtrace_input::load::Process;
use memtrace_insight::rules::CustomRules;
use memtrace_output::{Selection, SourceAccess, Window};
use memtrace_summary::{ProcessSummary, Progress, Summary, process_name};
use serde_json::json;

use crate::page::{
    COMPLETE_WINDOW, Loads, MAX_PROCESSES, PageProcess, TEXT_WIDTH, cannot, policy, write_end, write_head, write_json,
    write_processes, write_rank_totals, write_window,
};
use crate::parts::run_title;
use crate::style::{TextOptions, ToText};

/// The content of the page. The default is the whole run without quoted source files.
#[derive(Clone, Debug, Default)]
pub struct HtmlOptions<'a> {
    /// Only this device; -1 is the CPU.
    pub device: Option<i16>,
    /// The source files that may be quoted.
    pub sources: SourceAccess,
    /// For each process, the part of the recording that the timeline shows first. Without windows, the whole run.
    pub windows: Vec<Window>,
    /// The rules of the user's own categories, if the summary was made with them.
    pub custom_rules: Option<&'a CustomRules>,
    /// Whether the page may load more from the server that it came from: [`html_window`].
    pub is_served: bool,
}

/// A part of a process that a served page asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageWindow {
    /// The number of the process on the page.
    pub process: usize,
    /// The device; -1 is the CPU.
    pub device: i16,
    /// The first event, by `seq`.
    pub first: u64,
    /// The last event, by `seq`.
    pub last: u64,
}

/// Writes the page about `processes` of the run that `summary` describes.
///
/// # Errors
///
/// The errors of `out`. [`memtrace_input::error::Error::EmptyWindow`] if a process has no events of the device.
pub fn html_report(
    summary: &Summary,
    processes: &[&Process],
    options: &HtmlOptions<'_>,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<()> {
    let (summary, left_out) = restrict(summary, processes, options.device);
    let shown = shown_processes(&summary, processes);
    if let Some(device) = options.device {
        let selection = Selection { device: Some(device), ..Selection::default() };
        shown.iter().try_for_each(|process| Window::of(process, &selection, &mut |_| {}).map(drop))?;
    }
    let window_of = |shown: &&Process| {
        let place = processes.iter().position(|process| std::ptr::eq(*process, *shown))?;
        options.windows.get(place)?.bounds()
    };
    let text = summary.to_text(&TextOptions { width: TEXT_WIDTH, ..TextOptions::default() });
    write_head(
        &format!("memtrace: {}", run_title(&summary)),
        &text,
        if options.is_served { Loads::OwnServer } else { Loads::Nothing },
        out,
    )
    .map_err(cannot())?;
    let page = json!({
        "title": run_title(&summary),
        "only": left_out.then(|| selection_text(&summary, options.device)),
        "windows": shown.iter().map(window_of).collect::<Vec<_>>(),
        "processes_left_out": summary.processes.len() - shown.len(),
        "complete_window": options.is_served.then_some(COMPLETE_WINDOW),
        "memtrace_version": env!("CARGO_PKG_VERSION"),
    });
    write_json("summary", &[("page", page.to_string()), ("summary", summary.to_json())], out).map_err(cannot())?;
    let of = |process| PageProcess {
        process,
        marks: marks(&summary, process),
        sources: options.sources.clone(),
        custom_rules: options.custom_rules,
    };
    let processes: Vec<PageProcess<'_>> = shown.into_iter().map(of).collect();
    write_processes(&processes, options.device, out, progress)?;
    write_rank_totals(&processes, options.device, out, progress)?;
    write_end(out).map_err(cannot())
}

/// Writes the data of a window of the page that [`html_report`] writes with the same arguments. `false` if the page has
/// no such process or device, or the window is empty.
///
/// # Errors
///
/// The errors of `out`.
pub fn html_window(
    summary: &Summary,
    processes: &[&Process],
    options: &HtmlOptions,
    window: PageWindow,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<bool> {
    let (summary, _) = restrict(summary, processes, options.device);
    let PageWindow { process, device, first, last } = window;
    let Some(process) = shown_processes(&summary, processes).get(process).copied() else { return Ok(false) };
    let has_device = options.device.is_none_or(|only| only == device);
    if !has_device || !process.trace_index().sources.contains_key(&device) || first > last {
        return Ok(false);
    }
    let of = PageProcess {
        process,
        marks: marks(&summary, process),
        sources: options.sources.clone(),
        custom_rules: options.custom_rules,
    };
    write_window(&of, device, (first, last), out, progress).map(|()| true)
}

/// The content security policy of a served page, for the header of the answer.
pub fn served_policy() -> String {
    policy(Loads::OwnServer)
}

/// The processes that the page shows, in its order.
fn shown_processes<'a>(summary: &Summary, processes: &[&'a Process]) -> Vec<&'a Process> {
    let of = |one| processes.iter().find(|process| describes(one, process)).copied();
    summary.processes.iter().take(MAX_PROCESSES).filter_map(of).collect()
}

/// The events of a process at which the page must know the totals: peaks, then out-of-memory errors.
pub(crate) fn marks(summary: &Summary, process: &Process) -> Vec<u64> {
    let devices = summary.processes.iter().filter(|one| describes(one, process)).flat_map(|one| &one.devices);
    let (mut peaks, mut errors) = (Vec::new(), Vec::new());
    for device in devices {
        peaks.extend(device.peak.as_ref().map(|state| state.seq));
        errors.extend(device.ooms.iter().map(|oom| oom.in_use.seq));
    }
    peaks.extend(errors);
    peaks
}

/// Whether a summary describes this process.
fn describes(summary: &ProcessSummary, process: &Process) -> bool {
    is_trace(process, &summary.trace)
}

/// Whether this is the name of the process's trace.
pub(crate) fn is_trace(process: &Process, name: &str) -> bool {
    process.trace_name() == name
}

/// The summary of these processes and of this device alone, and whether anything was left out.
pub(crate) fn restrict(summary: &Summary, processes: &[&Process], device: Option<i16>) -> (Summary, bool) {
    let mut narrow = summary.clone();
    narrow.processes.retain(|one| processes.iter().any(|process| describes(one, process)));
    if narrow.processes.len() < summary.processes.len() {
        narrow.launch = None;
    }
    for process in &mut narrow.processes {
        process.devices.retain(|one| device.is_none_or(|device| one.device == device));
        process.issues.retain(|issue| device.is_none_or(|device| issue.device == device));
    }
    let devices = |summary: &Summary| summary.processes.iter().map(|process| process.devices.len()).sum::<usize>();
    let left_out = narrow.processes.len() < summary.processes.len() || devices(&narrow) < devices(summary);
    narrow.conclude();
    (narrow, left_out)
}

/// Formats processes and device: `rank 3, GPU 0`.
fn selection_text(summary: &Summary, device: Option<i16>) -> String {
    let mut names: Vec<String> = summary.processes.iter().take(MAX_PROCESSES).map(process_name).collect();
    names.extend(device.map(|device| if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") }));
    names.join(", ")
}
