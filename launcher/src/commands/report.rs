//! `memtrace report`: the summary of a run, as text for people or JSON for programs.

use std::io::IsTerminal;

use anyhow::Context;
use memtrace_analysis::{Replaying, Section, summarize_with};

use crate::cli::Report;
use crate::closing::{ProgressLine, layout};
use crate::say;

/// Prints the report.
pub(crate) fn report(options: &Report) -> anyhow::Result<()> {
    let run = super::open(&options.run)?;
    for problem in run.problems() {
        say(&format!("{}: {}", problem.path.display(), problem.text));
    }
    let mut line = ProgressLine::new(std::io::stderr().is_terminal());
    let section = options.section.as_deref().and_then(Section::named);
    let replaying = if section.is_some_and(Section::replays) { Replaying::Always } else { Replaying::WhereItTells };
    let summary = summarize_with(&run, replaying, &mut |progress| line.show(&progress));
    line.clear();
    let summary = summary?;
    let layout = layout(std::io::stdout().is_terminal());
    let text = match section {
        _ if options.json => summary.to_json() + "\n",
        Some(section) => summary.section_to_text(section, &layout),
        None => summary.to_text(&layout),
    };
    super::print(text.as_bytes()).context("cannot print the report")
}
