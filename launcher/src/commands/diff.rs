//! `memtrace diff`: shows why one run has a higher peak than another.

use std::io::IsTerminal;

use anyhow::ensure;
use memtrace_analysis::{DiffWanted, diff as compare};

use crate::cli::Diff;
use crate::closing::{ProgressLine, layout};

/// Prints the comparison. Fails when a run cannot be read or the two have nothing to compare.
pub(crate) fn diff(options: &Diff) -> anyhow::Result<()> {
    let a = super::open(&options.a)?;
    let b = options.b.as_deref().map(super::open).transpose()?;
    let steps = match options.steps.as_deref() {
        Some([n, m]) => Some((*n, *m)),
        _ => None,
    };
    let wanted = DiffWanted { steps, rank: options.rank, device: options.device };
    let mut line = ProgressLine::new(std::io::stderr().is_terminal());
    let report = compare(&a, b.as_ref().unwrap_or(&a), &wanted, &mut |progress| line.show(&progress));
    line.clear();
    let nothing = report.pairs.is_empty() && report.unpaired.is_empty();
    ensure!(
        !nothing,
        "nothing to compare: no process and device that was asked for has memory in {}{}",
        options.a.display(),
        report.remarks.iter().map(|remark| format!("; {remark}")).collect::<String>()
    );
    let text = if options.json { report.to_json() } else { report.to_text(&layout(std::io::stdout().is_terminal())) };
    super::put(&text, None)
}
