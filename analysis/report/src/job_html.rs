//! The ranks of a job as an interactive page: the table of ranks and phases, what differs, and what limits the figures.
//!
//! Where scripts do not run, the page shows the report as text.

use std::io::Write;

use memtrace_input::error::Result;
use memtrace_summary::JobReport;

use crate::page::{Loads, TEXT_WIDTH, cannot, write_end, write_head, write_json};
use crate::style::{TextOptions, ToText};

/// Writes the page about a job.
///
/// # Errors
///
/// The errors of `out`.
pub fn job_html(report: &JobReport, out: &mut dyn Write) -> Result<()> {
    let text = report.to_text(&TextOptions { width: TEXT_WIDTH, verbose: true, ..TextOptions::default() });
    write_head(&format!("memtrace job {}", report.job), &text, Loads::Nothing, out).map_err(cannot())?;
    write_json("job", &[("job", report.to_json())], out).map_err(cannot())?;
    write_end(out).map_err(cannot())
}
