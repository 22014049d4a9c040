//! `memtrace lines`: shows the GPU memory that each source line allocated and freed.

use anyhow::bail;
use memtrace_analysis::{LinesOptions, TextOptions, ToText, lines as read_lines, lines_html};

use super::selection::Selected;
use crate::cli::Lines;
use crate::message::WithHelp;
use crate::output::{Printed, Stream};
use crate::terminal::{ProgressLine, layout};

/// The page that `--html` writes by default.
const LINES_PAGE: &str = "lines.html";
/// The width of the table in a file or a pipe, in columns.
const FILE_WIDTH: usize = 160;

/// Prints the table. Fails when the run cannot be read.
pub(crate) fn lines(options: &Lines) -> anyhow::Result<()> {
    if let Some(Some(page)) = &options.html {
        super::ensure_page_name(page, "name the run first: memtrace lines RUN --html FILE")?;
    }
    let custom_rules = super::categories::read(options.categories.as_deref())?;
    let run = super::open_or_newest(options.run.as_deref())?;
    Selected { rank: options.rank, pid: options.pid, device: options.device }.ensure_in(&run)?;
    let lines_options = LinesOptions {
        functions: options.function.clone(),
        files: options.file.clone(),
        top: options.top,
        rank: options.rank,
        pid: options.pid,
        device: options.device,
        sources: options.sources,
        custom_rules,
        range: options.range.clone(),
        statistics: options.statistics,
    };
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let report = read_lines(&run, &lines_options, &mut |progress| line.show(&progress));
    line.clear();
    let Some(report) = report else {
        let (functions, files) = (options.function.join(" or "), options.file.join(" or "));
        let place = match (&*functions, &*files) {
            ("", "") => "a function of the program".to_owned(),
            ("", files) => format!("the file {files}"),
            (functions, "") => format!("the function {functions}"),
            (functions, files) => format!("the function {functions} of the file {files}"),
        };
        let range = options.range.as_ref().map_or_else(String::new, |range| format!(" in ranges of the name {range}"));
        bail!(WithHelp::new(
            format!("no memory was allocated or freed in {place}{range} in {}", run.path().display()),
            "run `memtrace lines` without --function and --file to list all functions; the run must have been recorded \
             without --stacks none"
        ));
    };
    let output = options.output.as_deref();
    if options.json {
        return super::write_output(Printed::Json(&report.to_json()), output);
    }
    if let Some(page_output) = &options.html {
        let mut page = Vec::new();
        lines_html(&report, &mut page)?;
        return super::write_page(&page, page_output.as_deref().or(output), LINES_PAGE);
    }
    let layout = if output.is_none() && Stream::Stdout.is_terminal() {
        layout(Stream::Stdout, false)
    } else {
        TextOptions { width: FILE_WIDTH, ..TextOptions::default() }
    };
    super::write_output(Printed::Styled(&report.to_text(&layout)), output)
}
