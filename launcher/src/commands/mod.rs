//! The subcommands, one small file each.

pub(crate) mod attach;
mod browser;
pub(crate) mod categories;
pub(crate) mod check;
pub(crate) mod diff;
pub(crate) mod docs;
pub(crate) mod doctor;
pub(crate) mod dry_run;
pub(crate) mod explain;
pub(crate) mod export;
mod job;
pub(crate) mod kernel;
mod library_options;
pub(crate) mod lines;
pub(crate) mod live;
pub(crate) mod manual;
pub(crate) mod mcp;
pub(crate) mod open;
pub(crate) mod redact;
pub(crate) mod report;
pub(crate) mod run;
mod selection;
mod serve;
mod similar_names;
pub(crate) mod snapshot;
pub(crate) mod suspend;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use memtrace_analysis::export::RANKS_TABLE;
use memtrace_analysis::load::MANIFEST_FILE;
use memtrace_analysis::{Process, Progress, Run, RunFolder, find_runs, is_run_folder, open_runs};

use crate::message::WithHelp;
use crate::output::{Printed, Stream};
use crate::output_file::OutputFile;
use crate::terminal::ProgressLine;
use crate::{message, output, sandbox};

/// The exit code of the reading commands when their input is unusable.
const BAD_INPUT: u8 = 2;

/// Runs a reading command in a sandboxed worker and returns its exit code. Errors go to stderr.
pub(crate) fn sandboxed(command: impl FnOnce() -> anyhow::Result<()>) -> u8 {
    sandboxed_check(|| command().map(|()| true))
}

/// Runs a command that passes (exit code 0) or fails (exit code 1), in a sandboxed worker. Errors go to stderr.
pub(crate) fn sandboxed_check(command: impl FnOnce() -> anyhow::Result<bool>) -> u8 {
    let code = sandbox::run(|| match command() {
        Ok(passes) => u8::from(!passes),
        Err(e) => exit_code(Err(e)),
    });
    code.unwrap_or_else(|e| {
        message::report(&e.context("cannot read the run"));
        BAD_INPUT
    })
}

/// The exit code of a result. Prints its error on stderr.
pub(crate) fn exit_code(result: anyhow::Result<()>) -> u8 {
    match result {
        Ok(()) => 0,
        Err(e) => {
            message::report(&e);
            BAD_INPUT
        }
    }
}

/// The run that a RUN argument names, or else the newest run in the current folder. The only run in a folder is named
/// by the folder too.
///
/// # Errors
///
/// If there is none.
fn run_or_newest(run: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(run) = run {
        return Ok(only_run(run).unwrap_or_else(|| run.to_owned()));
    }
    let runs = runs_by_time(Path::new("."));
    if let Some(newest) = runs.iter().rev().find(|run| has_recording(run)) {
        message::note(&format!("RUN is {}, the newest one in the current folder", newest.display()));
        return Ok(newest.clone());
    }
    let error = match runs.last() {
        Some(newest) => WithHelp::new(
            "no run in the current folder has recorded anything",
            format!("pass another run; memtrace report {} says why the newest one has not", newest.display()),
        ),
        None => WithHelp::new(
            "no run folder is in the current folder",
            "pass a run folder, a .mtr file or a PyTorch snapshot, or record one: memtrace -- COMMAND",
        ),
    };
    Err(error.into())
}

/// The run folders in a folder, those that were begun last at the end: by the time of the manifest, then by name.
fn runs_by_time(folder: &Path) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let begun = |path: &Path| path.join(MANIFEST_FILE).metadata().ok()?.modified().ok();
    let mut runs: Vec<_> = folders.filter_map(|path| Some((begun(&path)?, path))).collect();
    runs.sort();
    runs.into_iter().map(|(_, path)| path.strip_prefix(folder).map(Path::to_owned).unwrap_or(path)).collect()
}

/// Whether a run folder has a trace: each process that recorded anything has one.
fn has_recording(run: &Path) -> bool {
    let is_trace = |entry: std::fs::DirEntry| entry.path().extension().is_some_and(|extension| extension == "mtr");
    std::fs::read_dir(run).is_ok_and(|entries| entries.flatten().any(is_trace))
}

/// The run in a folder that is none itself and has only one with a recording.
fn only_run(folder: &Path) -> Option<PathBuf> {
    // The tables of an export are of a job.
    if !folder.is_dir() || is_run_folder(folder) || folder.join(RANKS_TABLE).is_dir() {
        return None;
    }
    let runs = find_runs(folder).ok()?;
    let mut recorded = runs.iter().filter(|run| has_recording(&run.path));
    match (recorded.next(), recorded.next(), &runs[..]) {
        (Some(only), None, _) | (None, None, [only]) => Some(only.path.clone()),
        _ => None,
    }
}

/// [`open()`] for a RUN argument that may be left out.
fn open_or_newest(run: Option<&Path>) -> anyhow::Result<Run> {
    Ok(open(&run_or_newest(run)?)?)
}

/// Opens the run that a RUN argument names. Shows a progress line when that takes long, and prints problems with its
/// files.
fn open(path: &Path) -> memtrace_analysis::Result<Run> {
    open_all(std::slice::from_ref(&path.to_owned()))
}

/// [`open()`] for several snapshots, which are one launch.
fn open_all(paths: &[PathBuf]) -> memtrace_analysis::Result<Run> {
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let what = match paths {
        [path] => format!("reading {}", path.file_name().unwrap_or_default().to_string_lossy()),
        _ => format!("reading {} snapshots", paths.len()),
    };
    let run = open_runs(paths, &mut |done, total| line.show(&Progress { what: &what, done, total }));
    line.clear();
    for problem in run.iter().flat_map(Run::problems) {
        message::warning(&format!("{}: {}", problem.path.display(), problem.text));
    }
    run
}

/// Writes a text into a file, or prints it on stdout.
fn write_output(what: Printed<'_>, output: Option<&Path>) -> anyhow::Result<()> {
    match output {
        Some(path) => OutputFile::write(path, what.content()),
        None => output::print(what).context("cannot write to stdout"),
    }
}

/// Writes a page into a file. Without one, into a file `name` in the current folder.
fn write_page(page: &[u8], output: Option<&Path>, name: &str) -> anyhow::Result<()> {
    let path = output.unwrap_or(Path::new(name));
    let cannot = || format!("cannot write {}", path.display());
    if output.is_some() {
        OutputFile::write(path, page)?;
    } else {
        // A symbolic link with this name is not followed. `RunFolder` guarantees that.
        let here = RunFolder::open(Path::new(".")).with_context(cannot)?;
        let mut new = here.create_atomic(name).with_context(cannot)?;
        new.file().write_all(page).with_context(cannot)?;
        new.commit().with_context(cannot)?;
    }
    message::status(&format!("wrote {}", path.display()));
    Ok(())
}

/// The page of a report that is written by default.
const REPORT_PAGE: &str = "report.html";

/// Fails for the FILE of an option `--html` that may also stand alone: a run after it would be its FILE.
fn ensure_page_name(page: &Path, help: &str) -> anyhow::Result<()> {
    ensure!(
        page.extension().is_some_and(|extension| extension == "html"),
        WithHelp::new(format!("cannot write {}: the name of a page ends in .html", page.display()), help.to_owned())
    );
    Ok(())
}

/// Fails when the output file is one of the files that are read.
fn ensure_not_input<'a>(path: &Path, read: impl IntoIterator<Item = &'a Process>) -> anyhow::Result<()> {
    let is_input =
        |process: &Process| path.canonicalize().is_ok_and(|p| process.path().canonicalize().is_ok_and(|q| p == q));
    ensure!(
        !read.into_iter().any(is_input),
        WithHelp::new(
            format!("cannot write {}: it is the file that is being read", path.display()),
            "name another file"
        )
    );
    Ok(())
}

/// Prints text on stdout.
fn print(text: &[u8]) -> io::Result<()> {
    output::print(Printed::Text(&String::from_utf8_lossy(text)))
}
