//! The HTML page of a comparison: the timelines of both runs on one scale, and what changed between the two peaks.
//!
//! Where scripts do not run, the page shows the comparison as text.

use std::io::Write;

use memtrace_input::error::Result;
use memtrace_input::load::{Process, Run};
use memtrace_insight::rules::CustomRules;
use memtrace_output::SourceAccess;
use memtrace_summary::{DiffPeak, DiffReport, Progress, Summary};
use serde_json::json;

use crate::diff_text::{headlines, moved_lines, name, remarks, title};
use crate::html::{is_trace, marks, restrict};
use crate::page::{
    Loads, MAX_PROCESSES, PageProcess, TEXT_WIDTH, cannot, write_end, write_head, write_json, write_processes,
};
use crate::style::{TextOptions, ToText};

/// A run of the page.
#[derive(Clone, Copy, Debug)]
pub struct DiffPageRun<'a> {
    /// The run.
    pub run: &'a Run,
    /// The run's summary.
    pub summary: &'a Summary,
    /// The rules of the user's own categories, if the summary was made with them.
    pub custom_rules: Option<&'a CustomRules>,
}

/// A process whose data the page has.
struct Shown<'a> {
    run: DiffPageRun<'a>,
    process: &'a Process,
    /// The compared peaks, by `seq`.
    peaks: Vec<u64>,
}

/// Writes the page about the comparison of run `a` with run `b`. Of a run that is compared with itself, the page has
/// the data once. `device` limits the page to the device to which the comparison is limited.
///
/// # Errors
///
/// The errors of `out`.
pub fn diff_html(
    report: &DiffReport,
    (a, b): (DiffPageRun<'_>, DiffPageRun<'_>),
    device: Option<i16>,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<()> {
    let mut shown: Vec<Shown<'_>> = Vec::new();
    let mut numbers: Vec<Option<[usize; 2]>> = Vec::new();
    for pair in &report.pairs {
        // A pair without a place for both of its processes has no timelines.
        let before = shown.len();
        let of_a = number(&mut shown, a, &pair.a);
        let of_b = number(&mut shown, b, &pair.b);
        let both = of_a.zip(of_b).map(|(a, b)| [a, b]);
        if both.is_none() {
            shown.truncate(before);
        }
        numbers.push(both);
    }
    let text = report.to_text(&TextOptions { width: TEXT_WIDTH, ..TextOptions::default() });
    let [name_a, name_b] = [&report.a, &report.b].map(name);
    let page_title = format!("{name_a} and {name_b}");
    write_head(&format!("memtrace: {page_title}"), &text, Loads::Nothing, out).map_err(cannot())?;
    let page = json!({
        "title": page_title,
        "names": [name_a, name_b],
        "verdict": headlines(report),
        "pairs": report.pairs.iter().map(|pair| title(pair).trim_end_matches(": ").to_owned()).collect::<Vec<_>>(),
        "moved_lines": report.pairs.iter().map(moved_lines).collect::<Vec<_>>(),
        "remarks": remarks(report),
        "processes": numbers,
        "memtrace_version": env!("CARGO_PKG_VERSION"),
    });
    let summary_of = |run: DiffPageRun<'_>| {
        let of_run = shown.iter().filter(|one| std::ptr::eq(one.run.run, run.run));
        restrict(run.summary, &of_run.map(|one| one.process).collect::<Vec<_>>(), device).0.to_json()
    };
    let members = [("page", page.to_string()), ("diff", report.to_json()), ("a", summary_of(a)), ("b", summary_of(b))];
    write_json("comparison", &members, out).map_err(cannot())?;
    let of = |Shown { run, process, peaks }| {
        let marks = peaks.into_iter().chain(marks(run.summary, process)).collect();
        let sources = SourceAccess::of(run.run, false);
        PageProcess { process, marks, sources, custom_rules: run.custom_rules }
    };
    let processes: Vec<PageProcess<'_>> = shown.into_iter().map(of).collect();
    write_processes(&processes, device, out, progress)?;
    write_end(out).map_err(cannot())
}

/// The number of the data of a peak's process. `None` if the page has no place for it.
fn number<'a>(shown: &mut Vec<Shown<'a>>, run: DiffPageRun<'a>, peak: &DiffPeak) -> Option<usize> {
    let same = |one: &Shown<'_>| std::ptr::eq(one.run.run, run.run) && is_trace(one.process, &peak.trace);
    let number = match shown.iter().position(same) {
        Some(number) => number,
        None if shown.len() < MAX_PROCESSES => {
            let process = run.run.processes().iter().find(|process| is_trace(process, &peak.trace))?;
            shown.push(Shown { run, process, peaks: Vec::new() });
            shown.len() - 1
        }
        None => return None,
    };
    shown[number].peaks.push(peak.seq);
    Some(number)
}
