//! `memtrace live`: the figures of recordings that run, once or in a terminal view.

mod keys;
mod screen;
mod text;
mod view;
mod watch;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::ensure;
use memtrace_analysis::printable;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use self::view::View;
pub(crate) use self::watch::Watch;
use super::BAD_INPUT;
use crate::cli::Live;
use crate::message::{self, WithHelp};
use crate::output::{Printed, Stream};
use crate::{running, sandbox};

/// How often the figures are read.
const REFRESH: Duration = Duration::from_secs(1);

/// Prints the figures, or shows them until the user quits. Returns the exit code.
pub(crate) fn live(options: &Live) -> u8 {
    if options.once {
        return super::sandboxed(|| once(options));
    }
    if !Stream::Stdout.is_terminal() || !std::io::stdin().is_terminal() {
        message::error("memtrace live needs a terminal", Some("add --once to print the figures"));
        return BAD_INPUT;
    }
    // The worker draws, so that neither a damaged trace nor its memory ends this process.
    let code = sandbox::run(|| super::exit_code(show(options)));
    code.unwrap_or_else(|error| {
        ratatui::restore();
        message::report(&error.context("cannot show the recordings"));
        BAD_INPUT
    })
}

fn once(options: &Live) -> anyhow::Result<()> {
    let mut watch = Watch::new(options.target.as_deref())?;
    let report = watch.refresh()?;
    if options.json {
        return super::write_output(Printed::Json(&(report.to_json() + "\n")), None);
    }
    ensure!(
        !report.recordings.is_empty(),
        WithHelp::new("no recording of this user runs on this machine", running::START_IT)
    );
    // A line end in a name does not begin a line.
    let text: String = text::lines(&report).iter().map(|line| printable::line(line) + "\n").collect();
    super::write_output(Printed::Text(&text), None)
}

fn show(options: &Live) -> anyhow::Result<()> {
    let mut watch = Watch::new(options.target.as_deref())?;
    let mut view = View::new(watch.refresh()?);
    #[expect(clippy::disallowed_methods, reason = "`screen::draw` makes what it has drawn printable")]
    let mut terminal = ratatui::try_init()?;
    let shown = run(&mut terminal, &mut watch, &mut view);
    ratatui::restore();
    shown
}

/// Draws and reads keys until the user quits.
fn run(terminal: &mut DefaultTerminal, watch: &mut Watch, view: &mut View) -> anyhow::Result<()> {
    let mut refreshed = Instant::now();
    loop {
        terminal.draw(|frame| screen::draw(frame, view))?;
        if event::poll(REFRESH.saturating_sub(refreshed.elapsed()))?
            && let Event::Key(key) = event::read()?
            && key.kind == KeyEventKind::Press
            && keys::press(view, key)
        {
            return Ok(());
        }
        if refreshed.elapsed() >= REFRESH {
            match watch.refresh() {
                Ok(report) => view.update(report),
                // The last figures stay.
                Err(error) => view.message = Some(format!("{error:#}")),
            }
            refreshed = Instant::now();
        }
    }
}
