//! `memtrace open`: shows the HTML report of a run in the browser, from its file or from a server ([`super::serve`]).

use std::path::Path;

use anyhow::{Context, ensure};
use memtrace_analysis::{HTML_REPORT, printable};

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
    run.metadata().with_context(|| {
        WithHelp::new(format!("cannot open {}", run.display()), "pass a run folder, or leave it out for the newest run")
    })?;
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
    if !super::browser::show(&page) {
        super::print(format!("{}\n", printable::line(&page.to_string_lossy())).as_bytes())?;
    }
    Ok(())
}
