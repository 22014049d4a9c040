//! What happens when a run has ended: every file of the run folder is written.
//!
//! A file is written beside its place and moved there when it is whole, so that a full disk or a second Ctrl-C leaves no half
//! files under good names. The traces themselves are never touched.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use super::build::summarize;
use super::html_page::html_page;
use super::summary::Summary;
use super::text::TextOptions;
use memtrace_input::RunFolder;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::{Problem, Process, open_folder};
use memtrace_input::symbols::SYMBOLS_FILE;
use memtrace_output::{SnapshotOptions, snapshot};

/// The report as a page.
const PAGE: &str = "report.html";

/// What to write.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FinishOptions {
    /// Do not write `<rank|pid>.pickle`.
    pub no_snapshot: bool,
    /// How snapshots are written.
    pub snapshot: SnapshotOptions,
    /// How `summary.txt` is laid out.
    pub text: TextOptions,
}

/// How far the work is, for a progress line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress<'a> {
    /// What is being done, e.g. `reading rank 3`.
    pub what: &'a str,
    /// Events done; of a snapshot that is being read, bytes.
    pub done: u64,
    /// As many as there are.
    pub total: u64,
}

/// What was written.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Written {
    /// The summary, for printing.
    pub summary: Summary,
    /// The files, in the order in which people want them.
    pub files: Vec<PathBuf>,
    /// What could not be read or written.
    pub problems: Vec<Problem>,
}

/// Analyses a run folder and writes `<rank|pid>.pickle`, `report.html`, `summary.txt` and `summary.json` into it, with native stacks
/// also `symbols.json`: the names, for machines that have other libraries.
///
/// A file that cannot be written (full disk) is a problem in [`Written`]; the others are written all the same.
///
/// # Errors
///
/// When the folder holds no readable trace.
pub fn finish_run(
    folder: &RunFolder,
    options: &FinishOptions,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Written> {
    let run = open_folder(folder)?;
    let mut written = Written { problems: run.problems().to_vec(), ..Written::default() };
    let mut summary = summarize(&run, progress)?;
    if let Some(symbols) = run.new_symbols() {
        let result = write_whole(folder, SYMBOLS_FILE, |file| {
            file.write_all(symbols.to_json().as_bytes()).map_err(Error::io(format!("cannot write {SYMBOLS_FILE}")))
        });
        // It goes without saying where it is fine: nobody opens it.
        if let Err(e) = result {
            written.problems.push(Problem { path: folder.path().join(SYMBOLS_FILE), text: e.to_string() });
        }
    }
    if !options.no_snapshot {
        for (process, name) in run.processes().iter().zip(run.names()) {
            let name = format!("{name}.pickle");
            let what = format!("writing {name}");
            let total = process.recording().event_count();
            let result = write_whole(folder, &name, |file| {
                snapshot(process, file, &options.snapshot, &mut |done| progress(Progress { what: &what, done, total }))
                    .map(|_| ())
            });
            if written.note(folder, &name, result)
                && let Some(p) = summary.processes.iter_mut().find(|p| p.pid == process.pid())
            {
                p.snapshot = Some(name);
            }
        }
    }
    summary.files = written.files.iter().filter_map(|f| Some(f.file_name()?.to_str()?.to_owned())).collect();
    summary.files.extend([PAGE, "summary.txt", "summary.json"].map(str::to_owned));
    for problem in written.problems.iter().skip(run.problems().len()) {
        summary.problems.push(format!("{}: {}", problem.path.display(), problem.text));
    }
    let processes: Vec<&Process> = run.processes().iter().collect();
    let result = write_whole(folder, PAGE, |file| html_page(&summary, &processes, None, file, progress));
    if !written.note(folder, PAGE, result) {
        summary.files.retain(|file| file != PAGE);
        summary.problems.extend(written.problems.last().map(|p| format!("{}: {}", p.path.display(), p.text)));
    }
    for (name, content) in [("summary.txt", summary.to_text(&options.text)), ("summary.json", summary.to_json())] {
        let result = write_whole(folder, name, |file| {
            file.write_all(content.as_bytes()).map_err(Error::io(format!("cannot write {name}")))
        });
        if !written.note(folder, name, result) {
            summary.files.retain(|file| file != name);
        }
    }
    written.summary = summary;
    Ok(written)
}

impl Written {
    /// Takes note of a file, or of why there is none; whether there is.
    fn note(&mut self, folder: &RunFolder, name: &str, result: Result<()>) -> bool {
        let path = folder.path().join(name);
        match result {
            Ok(()) => self.files.push(path),
            Err(e) => {
                self.problems.push(Problem { path, text: e.to_string() });
                return false;
            }
        }
        true
    }
}

fn write_whole(folder: &RunFolder, name: &str, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let what = || format!("cannot write {}", folder.path().join(name).display());
    let mut new = folder.begin(name).map_err(Error::io(what()))?;
    write(new.file())?;
    new.place().map_err(Error::io(what()))
}
