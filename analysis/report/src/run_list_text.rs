//! The runs of a folder as a table.

use memtrace_summary::{RunList, count_text, number_text};

use crate::style::{TextOptions, ToText};
use crate::table::{Align, Table};
use crate::text_report::TextReport;

/// The maximum number of runs, and of notices.
const ROWS: usize = 40;

/// A list of runs with the form of its times.
#[derive(Clone, Copy, Debug)]
pub struct RunListText<'a> {
    /// The list.
    pub list: &'a RunList,
    /// The text for nanoseconds since the Unix epoch.
    pub time: fn(u64) -> String,
}

impl ToText for RunListText<'_> {
    /// The table for a terminal, and how to choose a run.
    fn to_text(&self, options: &TextOptions) -> String {
        let RunList { path, runs, notices } = self.list;
        let mut report = TextReport::new(options);
        report.heading(&format!("memtrace report {}    {}", path.display(), number_text(runs.len() as u64, "run")));
        let has_jobs = runs.iter().any(|run| run.job.is_some());
        let mut head = vec![("Run", Align::Left), ("Began", Align::Left)];
        head.extend(has_jobs.then_some(("Job", Align::Left)));
        head.push(("Verdict", Align::Left));
        let mut table = Table::new(&head);
        for run in runs.iter().take(ROWS) {
            let name = run.path.strip_prefix(path).unwrap_or(&run.path).display().to_string();
            let mut cells = vec![name, run.started_ns.map(self.time).unwrap_or_default()];
            cells.extend(has_jobs.then(|| run.job.clone().unwrap_or_default()));
            cells.push(run.verdict.clone());
            table.row(cells);
        }
        report.lines.extend(table.lines(2, report.width, report.style));
        report.blank();
        if let Some(left_out) = runs.len().checked_sub(ROWS).filter(|count| *count > 0) {
            report.note(&format!("{} older runs are not listed", count_text(left_out as u64)));
        }
        notices.iter().take(ROWS).for_each(|notice| report.note(notice));
        let first = runs.first().map(|run| run.path.display().to_string()).unwrap_or_default();
        report.note(&format!("choose one, for example: memtrace report {first}"));
        if has_jobs {
            report.note(&format!("the runs of one job: memtrace report {} --job ID", path.display()));
        }
        report.text()
    }
}
