//! Writes every file of the run folder after a run has ended.
//!
//! A file is written to a temporary path and moved to its name when it is complete. So a full disk or a second Ctrl-C
//! leaves no partial files under the final names. The traces themselves are never modified.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use memtrace_input::RunFolder;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::{Problem, Process, open_folder};
use memtrace_input::symbols::SYMBOLS_FILE;
use memtrace_insight::rules::CustomRules;
use memtrace_output::{SOURCES_FILE, SnapshotOptions, SourceAccess, SourceHashes, snapshot};
use memtrace_summary::{Progress, Summary, SummaryOptions, summarize_with};

use crate::html::{HtmlOptions, html_report};
use crate::style::{TextOptions, ToText};

/// The file name of the HTML report.
pub const HTML_REPORT: &str = "report.html";

/// The files to write.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FinishOptions {
    /// Whether to skip `<rank|pid>.pickle`.
    pub no_snapshot: bool,
    /// Layout of `summary.txt`.
    pub text: TextOptions,
    /// The rules of the user's own categories.
    pub custom_rules: Option<Arc<CustomRules>>,
    /// The path that the files name, instead of the folder's own.
    pub shown_path: Option<String>,
}

/// The written files.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct FinishedRun {
    /// The summary, for printing.
    pub summary: Summary,
    /// The files, those of most interest to users first.
    pub files: Vec<PathBuf>,
    /// The problems of reading and writing.
    pub problems: Vec<Problem>,
}

/// Analyzes a run folder and writes `<rank|pid>.pickle`, `report.html`, `summary.txt` and `summary.json` into it. With
/// native stacks it also writes `symbols.json`, so that other machines can name native code without the same libraries.
/// `sources.json` has the hashes of the program's source files, so that later commands may quote them.
///
/// Only for a run that this machine has just recorded: source files that the traces name are read and quoted.
///
/// A file that cannot be written (full disk) becomes a problem in [`FinishedRun`]; the other files are written
/// nevertheless.
///
/// # Errors
///
/// If the folder contains no readable trace.
pub fn finish_run(
    folder: &RunFolder,
    options: &FinishOptions,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<FinishedRun> {
    let run = open_folder(folder)?;
    let mut written = FinishedRun { problems: run.problems().to_vec(), ..FinishedRun::default() };
    let summary_options = SummaryOptions { custom_rules: options.custom_rules.as_deref(), ..SummaryOptions::default() };
    let mut summary = summarize_with(&run, &summary_options, progress)?;
    // These files are not listed among the files, because users never open them. Only a failure is reported.
    let mut write_json = |name: &str, json: String| {
        let result = write_whole(folder, name, |file| {
            file.write_all(json.as_bytes()).map_err(Error::io(format!("cannot write {name}")))
        });
        if let Err(e) = result {
            written.problems.push(Problem { path: folder.path().join(name), text: e.to_string() });
        }
    };
    if let Some(symbols) = run.new_symbols() {
        write_json(SYMBOLS_FILE, symbols.to_json());
    }
    let hashes = SourceHashes::of_new_run(run.processes());
    if !hashes.is_empty() {
        write_json(SOURCES_FILE, hashes.to_json());
    }
    let custom_rules = options.custom_rules.clone();
    let snapshot_options =
        SnapshotOptions { sources: SourceAccess::AllNamed, custom_rules, ..SnapshotOptions::default() };
    if !options.no_snapshot {
        for (process, name) in run.processes().iter().zip(run.process_names()) {
            let name = format!("{name}.pickle");
            let what = format!("writing {name}");
            let total = process.recording().event_count();
            let result = write_whole(folder, &name, |file| {
                snapshot(process, file, &snapshot_options, &mut |done| progress(Progress { what: &what, done, total }))
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
    summary.files.extend([HTML_REPORT, "summary.txt", "summary.json"].map(str::to_owned));
    for problem in written.problems.iter().skip(run.problems().len()) {
        summary.problems.push(format!("{}: {}", problem.path.display(), problem.text));
    }
    if let Some(shown) = &options.shown_path {
        let path = std::mem::replace(&mut summary.run.path, shown.clone());
        for problem in &mut summary.problems {
            *problem = problem.replace(&path, shown);
        }
    }
    summary.conclude();
    let processes: Vec<&Process> = run.processes().iter().collect();
    let html_options = HtmlOptions {
        device: None,
        sources: SourceAccess::AllNamed,
        windows: Vec::new(),
        custom_rules: options.custom_rules.as_deref(),
        is_served: false,
    };
    let result =
        write_whole(folder, HTML_REPORT, |file| html_report(&summary, &processes, &html_options, file, progress));
    if !written.note(folder, HTML_REPORT, result) {
        summary.files.retain(|file| file != HTML_REPORT);
        summary.problems.extend(written.problems.last().map(|p| format!("{}: {}", p.path.display(), p.text)));
    }
    summary.conclude();
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

impl FinishedRun {
    /// Records a file, or the reason why it is missing. Returns whether it was written.
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
    let mut new = folder.create_atomic(name).map_err(Error::io(what()))?;
    write(new.file())?;
    new.commit().map_err(Error::io(what()))
}
