//! Runs the analysis after the command has ended, with a progress line on a terminal, and prints the end-of-run summary
//! on stderr.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use memtrace_analysis::{FinishOptions, Progress, RunFolder, TextOptions, Written, finish_run};

use crate::{confined, say};

/// Work that takes less time than this shows no progress.
const SOON: Duration = Duration::from_secs(1);
/// The minimum time between two updates of the progress line.
const REFRESH: Duration = Duration::from_millis(100);

/// The maximum number of problems that are printed one by one. A hostile program can put any number of invalid files
/// into the folder.
const SAID_PROBLEMS: usize = 8;

/// Output options of the end of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    /// Print only errors.
    pub(crate) quiet: bool,
    /// Write no snapshots.
    pub(crate) no_snapshot: bool,
}

/// Analyzes the run in `folder`, writes its files and prints the end-of-run summary.
///
/// A failure of the analysis does not end the launcher.
pub(crate) fn close(folder: &RunFolder, manner: Manner) {
    let analysis = || {
        analyse(folder, manner);
        0
    };
    if let Err(why) = confined::run(analysis) {
        say(&format!("the analysis {why}; the recording itself is safe in {}", folder.path().display()));
    }
}

fn analyse(folder: &RunFolder, manner: Manner) {
    let options = FinishOptions { no_snapshot: manner.no_snapshot, ..FinishOptions::default() };
    let mut line = ProgressLine::new(!manner.quiet && std::io::stderr().is_terminal());
    let written = finish_run(folder, &options, &mut |progress| line.show(&progress));
    line.clear();
    match written {
        Ok(written) => page(&written, manner.quiet),
        Err(e) => say(&format!("{e}; the recording itself is safe in {}", folder.path().display())),
    }
}

fn page(written: &Written, quiet: bool) {
    for problem in written.problems.iter().take(SAID_PROBLEMS) {
        say(&format!("{}: {}", problem.path.display(), problem.text));
    }
    if written.problems.len() > SAID_PROBLEMS {
        say(&format!("{} more: see summary.json", written.problems.len() - SAID_PROBLEMS));
    }
    if quiet {
        return;
    }
    let text = written.summary.to_text(&layout(std::io::stderr().is_terminal()));
    // A closed stderr is not an error.
    let _ = write!(std::io::stderr().lock(), "{text}");
}

/// The text layout: with colors on a terminal, unless `NO_COLOR` or `TERM=dumb` turns them off.
pub(crate) fn layout(terminal: bool) -> TextOptions {
    let colour = terminal
        && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
        && std::env::var_os("TERM").is_none_or(|t| t != "dumb");
    TextOptions { colour, ..TextOptions::default() }
}

/// A progress line that is overwritten in place.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    enabled: bool,
    began: Instant,
    shown: Option<Instant>,
}

impl ProgressLine {
    /// Creates a line that shows nothing yet. Without `enabled` it never shows anything.
    pub(crate) fn new(enabled: bool) -> ProgressLine {
        ProgressLine { enabled, began: Instant::now(), shown: None }
    }

    /// Shows the progress of the work.
    pub(crate) fn show(&mut self, progress: &Progress<'_>) {
        if !self.enabled || self.began.elapsed() < SOON || self.shown.is_some_and(|at| at.elapsed() < REFRESH) {
            return;
        }
        self.shown = Some(Instant::now());
        let percent = progress.done.saturating_mul(100).checked_div(progress.total).unwrap_or(0);
        let _ = write!(std::io::stderr(), "\r\x1b[Kmemtrace: {} {percent} %", progress.what);
    }

    /// Erases the line.
    pub(crate) fn clear(&mut self) {
        if self.shown.take().is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
