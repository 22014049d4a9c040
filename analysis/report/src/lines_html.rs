//! The line table as an interactive page: a table of functions, and their source with figures at each line.
//!
//! Where scripts do not run, the page shows the table as text.

use std::io::Write;

use memtrace_input::error::Result;
use memtrace_insight::rules::NO_CUSTOM_CATEGORY;
use memtrace_summary::{LinesReport, device_text};
use serde_json::json;

use crate::lines_text::{LEGEND, notes};
use crate::page::{Loads, TEXT_WIDTH, cannot, write_end, write_head, write_json};
use crate::parts::NOT_COMPILED;
use crate::style::{TextOptions, ToText};

/// Writes the page about a line table.
///
/// # Errors
///
/// The errors of `out`.
pub fn lines_html(report: &LinesReport, out: &mut dyn Write) -> Result<()> {
    let text = report.to_text(&TextOptions { width: TEXT_WIDTH, ..TextOptions::default() });
    write_head(&format!("memtrace lines {}", report.run), &text, Loads::Nothing, out).map_err(cannot())?;
    let page = json!({
        "device": device_text(report.rank, report.pid, report.device),
        "legend": LEGEND,
        "notes": notes(report),
        "no_custom_category": NO_CUSTOM_CATEGORY,
        "not_compiled": NOT_COMPILED,
        "memtrace_version": env!("CARGO_PKG_VERSION"),
    });
    write_json("line-table", &[("page", page.to_string()), ("lines", report.to_json())], out).map_err(cannot())?;
    write_end(out).map_err(cannot())
}
