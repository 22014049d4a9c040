//! `memtrace report`: the summary of a run, as text for people or JSON for programs.

use std::io::IsTerminal;

use anyhow::Context;
use memtrace_analysis::{open_run, summarize};

use crate::cli::Report;
use crate::closing::{ProgressLine, layout};
use crate::say;

/// Prints the report.
pub(crate) fn report(options: &Report) -> anyhow::Result<()> {
    let run = open_run(&options.run)?;
    for problem in run.problems() {
        say(&format!("{}: {}", problem.path.display(), problem.text));
    }
    let mut line = ProgressLine::new(std::io::stderr().is_terminal());
    let summary = summarize(&run, &mut |progress| line.show(&progress));
    line.clear();
    let summary = summary?;
    let text =
        if options.json { summary.to_json() + "\n" } else { summary.to_text(&layout(std::io::stdout().is_terminal())) };
    super::print(text.as_bytes()).context("cannot print the report")
}
