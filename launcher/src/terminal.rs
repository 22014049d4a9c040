//! What the terminal shows: a progress line on stderr, and the layout of text reports.

use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use memtrace_analysis::{Progress, TextOptions, printable};

/// Work that takes less time than this shows no progress.
const PROGRESS_DELAY: Duration = Duration::from_secs(1);
/// The minimum time between two updates of the progress line.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// The limits of a report's width on a terminal, in columns.
const NARROWEST: u16 = 60;
const WIDEST: u16 = 200;

/// The text layout: on a terminal with its width, bars and colors. `NO_COLOR` or `TERM=dumb` turns colors off. In files and
/// pipes the layout is the same everywhere.
pub(crate) fn layout(stream: &(impl IsTerminal + AsFd), verbose: bool) -> TextOptions {
    let plain = TextOptions { verbose, ..TextOptions::default() };
    if !stream.is_terminal() {
        return plain;
    }
    let is_dumb = std::env::var_os("TERM").is_some_and(|t| t == "dumb");
    let color = !is_dumb && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    // A terminal that does not know its size reports 0.
    let columns = rustix::termios::tcgetwinsize(stream).map(|size| size.ws_col).ok().filter(|columns| *columns > 0);
    let width = columns.map_or(plain.width, |columns| columns.clamp(NARROWEST, WIDEST).into());
    TextOptions { color, width, blocks: !is_dumb && is_utf8(), ..plain }
}

/// Whether the locale's characters are in UTF-8: the first variable that is set decides, as in setlocale(3).
fn is_utf8() -> bool {
    let set = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(std::env::var_os).find(|value| !value.is_empty());
    set.is_some_and(|value| {
        let name = value.to_string_lossy().to_ascii_lowercase();
        name.contains("utf-8") || name.contains("utf8")
    })
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
