//! `memtrace diff`: shows why one run has a higher peak than another.

use std::path::Path;

use anyhow::bail;
use memtrace_analysis::{
    DiffOptions, DiffPageRun, DiffReport, Run, Summary, SummaryOptions, ToText, diff as compare, diff_html,
    summarize_with,
};

use super::selection::{Selected, ensure_step};
use crate::cli::Diff;
use crate::message::WithHelp;
use crate::output::{Printed, Stream};
use crate::terminal::{ProgressLine, layout};

/// The page that `--html` writes by default.
const DIFF_PAGE: &str = "diff.html";

/// Prints the comparison, or writes its page. Fails when a run cannot be read or the two have nothing to compare.
pub(crate) fn diff(options: &Diff) -> anyhow::Result<()> {
    if let Some(Some(page)) = &options.html {
        super::ensure_page_name(page, "name the runs first: memtrace diff A B --html FILE")?;
    }
    let custom_rules = super::categories::read(options.categories.as_deref())?;
    let a = super::open_or_newest(options.a.as_deref())?;
    let b = options.b.as_deref().map(|b| super::open_or_newest(Some(b))).transpose()?;
    let selected = Selected { rank: options.rank, device: options.device, ..Selected::default() };
    std::iter::once(&a).chain(&b).try_for_each(|run| selected.ensure_in(run))?;
    let steps = match options.steps.as_deref() {
        Some([n, m]) => Some((*n, *m)),
        _ => None,
    };
    let (rank, device, sources) = (options.rank, options.device, options.sources);
    let diff_options = DiffOptions { steps, rank, device, sources, custom_rules: custom_rules.clone() };
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let report = compare(&a, b.as_ref().unwrap_or(&a), &diff_options, &mut |progress| line.show(&progress));
    line.clear();
    [&report.a, &report.b].into_iter().try_for_each(ensure_step)?;
    if report.pairs.is_empty() && report.unpaired.is_empty() {
        let remarks: String = report.notes.iter().map(|note| format!("; {note}")).collect();
        bail!(WithHelp::new(
            format!("cannot compare {}: no selected process and device has memory{remarks}", a.path().display()),
            "select another rank or device, or leave out --rank and --device"
        ));
    }
    if let Some(page) = &options.html {
        let summary_options = SummaryOptions { custom_rules: custom_rules.as_deref(), ..SummaryOptions::default() };
        return write_page(&report, &a, b.as_ref(), &summary_options, device, page.as_deref());
    }
    if options.json {
        return super::write_output(Printed::Json(&report.to_json()), None);
    }
    super::write_output(Printed::Styled(&report.to_text(&layout(Stream::Stdout, false))), None)
}

/// Writes the page of a comparison. Without run `b`, it is about two steps of run `a`.
fn write_page(
    report: &DiffReport,
    a: &Run,
    b: Option<&Run>,
    summary_options: &SummaryOptions<'_>,
    device: Option<i16>,
    output: Option<&Path>,
) -> anyhow::Result<()> {
    super::ensure_not_input(
        output.unwrap_or(Path::new(DIFF_PAGE)),
        a.processes().iter().chain(b.into_iter().flat_map(Run::processes)),
    )?;
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let mut page = Vec::new();
    let drawn = (|| {
        let mut summary_of = |run: &Run| -> memtrace_analysis::Result<Summary> {
            summarize_with(run, summary_options, &mut |progress| line.show(&progress))
        };
        let summaries = (summary_of(a)?, b.map(&mut summary_of).transpose()?);
        let custom_rules = summary_options.custom_rules;
        let page_a = DiffPageRun { run: a, summary: &summaries.0, custom_rules };
        let page_b =
            b.zip(summaries.1.as_ref()).map_or(page_a, |(run, summary)| DiffPageRun { run, summary, custom_rules });
        diff_html(report, (page_a, page_b), device, &mut page, &mut |progress| line.show(&progress))
    })();
    line.clear();
    drawn?;
    super::write_page(&page, output, DIFF_PAGE)
}
