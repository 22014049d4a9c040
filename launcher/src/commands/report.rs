//! `memtrace report`: prints the summary of a run, as text for people or as JSON for programs.

use anyhow::ensure;
use memtrace_analysis::{Replaying, Section, SummaryOptions, ToText, is_run_folder, range_text, summarize_with};

use super::job;

use crate::cli::Report;
use crate::message::WithHelp;
use crate::output::{Printed, Stream};
use crate::terminal::{ProgressLine, layout};

/// Prints the report. Fails when the run cannot be read.
pub(crate) fn report(options: &Report) -> anyhow::Result<()> {
    if let Some(Some(page)) = &options.html {
        super::ensure_page_name(page, "name the run first: memtrace report RUN --html FILE")?;
    }
    let mut paths = options.runs.clone();
    match &mut paths[..] {
        [] => paths.push(super::run_or_newest(None)?),
        // The JSON and the page of a folder are those of a job, however many runs it has.
        [path] if options.job.is_none() && !options.json && options.html.is_none() => {
            *path = super::run_or_newest(Some(path))?
        }
        _ => {}
    }
    ensure!(
        options.job.is_none() || paths.len() == 1,
        WithHelp::new("--job chooses among the runs of one folder", "pass one folder of run folders")
    );
    if let [path] = &paths[..]
        && (options.job.is_some() || job::is_folder_of_runs(path) || options.ranks && is_run_folder(path))
    {
        return job::report(path, options);
    }
    let rules = super::categories::read(options.categories.as_deref())?;
    let run = super::open_all(&paths)?;
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let section = options.section.as_deref().or(options.ranks.then_some("ranks")).and_then(Section::named);
    let replaying = if section.is_some_and(Section::replays) { Replaying::Always } else { Replaying::WhenUseful };
    let range = options.range.as_deref();
    let released_after = options.released_after.as_ref();
    let is_recording = options.so_far;
    let summary_options =
        SummaryOptions { replaying, custom_rules: rules.as_deref(), range, released_after, is_recording };
    let summary = summarize_with(&run, &summary_options, &mut |progress| line.show(&progress));
    line.clear();
    let summary = summary?;
    if let Some(page) = &options.html {
        return super::export::write_page_of(&run, &summary, &summary_options, page.as_deref());
    }
    let layout = layout(Stream::Stdout, options.verbose);
    if options.json {
        return super::write_output(Printed::Json(&(summary.to_json() + "\n")), None);
    }
    let text = match (section, range) {
        (Some(section), _) => memtrace_analysis::section_text(&summary, section, &layout),
        (None, Some(range)) => {
            let text = range_text(&summary, &layout);
            ensure!(
                !text.is_empty(),
                WithHelp::new(
                    format!("{} has no range named {range} on a device", run.path().display()),
                    "run `memtrace report --json`: `labels` lists the ranges"
                )
            );
            text
        }
        (None, None) => summary.to_text(&layout),
    };
    super::write_output(Printed::Styled(&text), None)
}
