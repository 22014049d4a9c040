//! `memtrace open`: shows the HTML report of a run in the browser, from its file or from a server ([`super::serve`]).

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::ensure;
use memtrace_analysis::HTML_REPORT;

use crate::cli::Open;
use crate::message::WithHelp;

/// Opens the page of a run, or serves it. Returns the exit code.
pub(crate) fn open(options: &Open) -> u8 {
    let run = super::run_or_newest(options.run.as_deref());
    match run {
        Ok(run) if options.serve => super::serve::serve(&run, options.port),
        run => super::exit_code(run.and_then(|run| open_file(&run))),
    }
}

/// Opens the page, or prints its path where there is no browser. Fails if the run has no page.
fn open_file(run: &Path) -> anyhow::Result<()> {
    let page = if run.is_file() { run.to_owned() } else { run.join(HTML_REPORT) };
    let is_page = page.extension().is_some_and(|extension| extension == "html") && page.is_file();
    let run = run.display();
    ensure!(
        is_page,
        WithHelp::new(
            format!("{run} has no {HTML_REPORT}"),
            format!("write one: memtrace export {run} --to html -o {HTML_REPORT}")
        )
    );
    let page = std::path::absolute(&page).unwrap_or(page);
    if !show(page.as_os_str()) {
        super::print(format!("{}\n", page.display()).as_bytes())?;
    }
    Ok(())
}

/// Shows a page, a path or a URL, in the browser. Returns whether there is one.
pub(super) fn show(page: &OsStr) -> bool {
    browser().is_some_and(|browser| starts(&browser, page))
}

/// The program that shows a page; `None` where there is no display for one.
fn browser() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let has_display = set("DISPLAY").is_some() || set("WAYLAND_DISPLAY").is_some();
    // $BROWSER can be a list. A browser in it may need no display.
    let first = set("BROWSER").and_then(|list| std::env::split_paths(&list).next());
    first.or_else(|| has_display.then(|| PathBuf::from("xdg-open")))
}

/// Starts the program with the page. It may outlive memtrace.
fn starts(browser: &Path, page: &OsStr) -> bool {
    let mut command = Command::new(browser);
    command.arg(page).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().is_ok()
}
