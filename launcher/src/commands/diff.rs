//! `memtrace diff`: shows why one run has a higher peak than another.

use std::io::IsTerminal;

use anyhow::bail;
use memtrace_analysis::{DiffOptions, ToText, diff as compare};

use super::selection::{Selected, ensure_step};
use crate::cli::Diff;
use crate::message::WithHelp;
use crate::terminal::{ProgressLine, layout};

/// Prints the comparison. Fails when a run cannot be read or the two have nothing to compare.
pub(crate) fn diff(options: &Diff) -> anyhow::Result<()> {
    let custom_rules = super::categories::read(options.categories.as_deref())?;
    let a = super::open(&options.a)?;
    let b = options.b.as_deref().map(super::open).transpose()?;
    let selected = Selected { rank: options.rank, device: options.device, ..Selected::default() };
    std::iter::once(&a).chain(&b).try_for_each(|run| selected.ensure_in(run))?;
    let steps = match options.steps.as_deref() {
        Some([n, m]) => Some((*n, *m)),
        _ => None,
    };
    let (rank, device, sources) = (options.rank, options.device, options.sources);
    let diff_options = DiffOptions { steps, rank, device, sources, custom_rules };
    let mut line = ProgressLine::new(std::io::stderr().is_terminal());
    let report = compare(&a, b.as_ref().unwrap_or(&a), &diff_options, &mut |progress| line.show(&progress));
    line.clear();
    [&report.a, &report.b].into_iter().try_for_each(ensure_step)?;
    if report.pairs.is_empty() && report.unpaired.is_empty() {
        let remarks: String = report.notes.iter().map(|note| format!("; {note}")).collect();
        bail!(WithHelp::new(
            format!("cannot compare {}: no selected process and device has memory{remarks}", options.a.display()),
            "select another rank or device, or leave out --rank and --device"
        ));
    }
    let text = if options.json { report.to_json() } else { report.to_text(&layout(&std::io::stdout(), false)) };
    super::write_output(&text, None)
}
