//! `memtrace open`: shows the HTML report of a run in the browser.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::ensure;
use memtrace_analysis::HTML_REPORT;

use crate::cli::Open;
use crate::message::WithHelp;

/// Opens the page, or prints its path where there is no browser. Fails if the run has no page.
pub(crate) fn open(options: &Open) -> anyhow::Result<()> {
    let run = super::run_or_newest(options.run.as_deref())?;
    let page = if run.is_file() { run.clone() } else { run.join(HTML_REPORT) };
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
    if !browser().is_some_and(|browser| starts(&browser, &page)) {
        super::print(format!("{}\n", page.display()).as_bytes())?;
    }
    Ok(())
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
fn starts(browser: &Path, page: &Path) -> bool {
    let mut command = Command::new(browser);
    command.arg(page).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().is_ok()
}
