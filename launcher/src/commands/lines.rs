//! `memtrace lines`: shows the GPU memory that each source line allocated and freed.

use std::io::IsTerminal;

use anyhow::bail;
use memtrace_analysis::{LinesWanted, lines as read_lines};

use crate::cli::Lines;
use crate::closing::{ProgressLine, layout};

/// Prints the table. Fails when the run cannot be read.
pub(crate) fn lines(options: &Lines) -> anyhow::Result<()> {
    let run = super::open(&options.run)?;
    let wanted = LinesWanted {
        function: options.function.clone(),
        file: options.file.clone(),
        top: options.top,
        rank: options.rank,
        pid: options.pid,
        device: options.device,
    };
    let mut line = ProgressLine::new(std::io::stderr().is_terminal());
    let report = read_lines(&run, &wanted, &mut |progress| line.show(&progress));
    line.clear();
    let Some(report) = report else {
        let what = match (&options.function, &options.file) {
            (Some(function), Some(file)) => format!("in a function {function} of a file {file}"),
            (Some(function), None) => format!("in a function {function}"),
            (None, Some(file)) => format!("in a file {file}"),
            (None, None) => "in a function of the program's own".to_owned(),
        };
        bail!(
            "{}: no memory was handed out or given back {what}, where it was asked for; `memtrace lines` without --function and --file \
             lists what there is, and a recording needs stacks (not --stacks none)",
            options.run.display()
        );
    };
    let text = if options.json {
        report.to_json()
    } else if options.html {
        report.to_html()
    } else {
        report.to_text(&layout(options.output.is_none() && std::io::stdout().is_terminal()))
    };
    super::put(&text, options.output.as_deref())
}
