//! The terminal: a progress line on stderr, and the layout of text reports.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use memtrace_analysis::{Progress, TextOptions, printable};

use crate::output::Stream;

/// Work that takes less time than this shows no progress.
const PROGRESS_DELAY: Duration = Duration::from_secs(1);
/// The maximum number of updates of the progress line.
const DRAWS_PER_SECOND: u8 = 10;
const TEMPLATE: &str = "memtrace: {msg} [{bar:24}] {percent} %, {eta} left";

/// The limits of a report's width on a terminal, in columns.
const NARROWEST: u16 = 60;
const WIDEST: u16 = 200;

/// The text layout: on a terminal with its width, bars and colors. `NO_COLOR` or `TERM=dumb` turns colors off. In files
/// and pipes the layout is the same everywhere.
pub(crate) fn layout(stream: Stream, verbose: bool) -> TextOptions {
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

/// A progress line that is overwritten in place: what is done, a bar, and the time left.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    is_enabled: bool,
    began: Instant,
    bar: Option<ProgressBar>,
}

impl ProgressLine {
    /// Creates a line that shows nothing yet. Without `is_enabled` it never shows anything.
    pub(crate) fn new(is_enabled: bool) -> ProgressLine {
        ProgressLine { is_enabled, began: Instant::now(), bar: None }
    }

    /// Shows the progress of the work.
    pub(crate) fn show(&mut self, progress: &Progress<'_>) {
        if !self.is_enabled || self.began.elapsed() < PROGRESS_DELAY {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            #[expect(clippy::disallowed_methods, reason = "its text is made printable below")]
            let target = ProgressDrawTarget::stderr_with_hz(DRAWS_PER_SECOND);
            let bar = ProgressBar::with_draw_target(None, target);
            // A wrong template would be a defect: the default one shows less.
            bar.with_style(ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        let what = printable::line(progress.what);
        if bar.message() != what {
            bar.set_message(what.into_owned());
            bar.reset_eta();
        }
        bar.set_length(progress.total);
        bar.set_position(progress.done);
    }

    /// Erases the line.
    pub(crate) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
