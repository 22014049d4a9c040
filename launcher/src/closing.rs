//! What happens when a run has ended: the analysis, with a progress line on a terminal, and the closing page on stderr.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use memtrace_analysis::{FinishOptions, Progress, RunFolder, TextOptions, Written, finish_run};

use crate::{confined, say};

/// Work that takes no longer shows no progress.
const SOON: Duration = Duration::from_secs(1);
/// The progress line changes this often.
const REFRESH: Duration = Duration::from_millis(100);

/// Problems that are told one by one: a hostile program can put as many bad files into the folder as it likes.
const SAID_PROBLEMS: usize = 8;

/// How much is said.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    /// Print nothing but errors.
    pub(crate) quiet: bool,
    /// Write no snapshots.
    pub(crate) no_snapshot: bool,
}

/// Analyses the run in `folder`, writes its files and prints the closing page; the launcher lives on, whatever becomes of that.
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
    // A closed stderr is no reason to fail.
    let _ = write!(std::io::stderr().lock(), "{text}");
}

/// The layout that suits where the text goes.
pub(crate) fn layout(terminal: bool) -> TextOptions {
    let colour = terminal
        && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
        && std::env::var_os("TERM").is_none_or(|t| t != "dumb");
    TextOptions { colour, ..TextOptions::default() }
}

/// One line that is overwritten in place.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    enabled: bool,
    began: Instant,
    shown: Option<Instant>,
}

impl ProgressLine {
    /// A line that shows nothing yet; never, if not `enabled`.
    pub(crate) fn new(enabled: bool) -> ProgressLine {
        ProgressLine { enabled, began: Instant::now(), shown: None }
    }

    /// Shows how far the work is.
    pub(crate) fn show(&mut self, progress: &Progress<'_>) {
        if !self.enabled || self.began.elapsed() < SOON || self.shown.is_some_and(|at| at.elapsed() < REFRESH) {
            return;
        }
        self.shown = Some(Instant::now());
        let percent = progress.done.saturating_mul(100).checked_div(progress.total).unwrap_or(0);
        let _ = write!(std::io::stderr(), "\r\x1b[Kmemtrace: {} {percent} %", progress.what);
    }

    /// Leaves an empty line.
    pub(crate) fn clear(&mut self) {
        if self.shown.take().is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
