//! What the terminal shows: a progress line on stderr, and the layout of text reports.

use std::io::Write;
use std::time::{Duration, Instant};

use memtrace_analysis::{Progress, TextOptions, printable};

/// Work that takes less time than this shows no progress.
const PROGRESS_DELAY: Duration = Duration::from_secs(1);
/// The minimum time between two updates of the progress line.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// The text layout: with colors on a terminal, unless `NO_COLOR` or `TERM=dumb` turns them off.
pub(crate) fn layout(is_terminal: bool) -> TextOptions {
    let color = is_terminal
        && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
        && std::env::var_os("TERM").is_none_or(|t| t != "dumb");
    TextOptions { color, ..TextOptions::default() }
}

/// A progress line that is overwritten in place.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    is_enabled: bool,
    began: Instant,
    shown: Option<Instant>,
}

impl ProgressLine {
    /// Creates a line that shows nothing yet. Without `is_enabled` it never shows anything.
    pub(crate) fn new(is_enabled: bool) -> ProgressLine {
        ProgressLine { is_enabled, began: Instant::now(), shown: None }
    }

    /// Shows the progress of the work.
    pub(crate) fn show(&mut self, progress: &Progress<'_>) {
        if !self.is_enabled
            || self.began.elapsed() < PROGRESS_DELAY
            || self.shown.is_some_and(|at| at.elapsed() < PROGRESS_INTERVAL)
        {
            return;
        }
        self.shown = Some(Instant::now());
        let percent = progress.done.saturating_mul(100).checked_div(progress.total).unwrap_or(0);
        let _ = write!(std::io::stderr(), "\r\x1b[Kmemtrace: {} {percent} %", printable::line(progress.what));
    }

    /// Erases the line.
    pub(crate) fn clear(&mut self) {
        if self.shown.take().is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
