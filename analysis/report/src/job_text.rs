//! The ranks of a job as text: the table of ranks and phases, worst rank first, and what limits it.

use memtrace_summary::{HostClock, JobReport, count_text, number_text};

use crate::rank_table_text::Listing;
use crate::style::{TextOptions, ToText};
use crate::text_report::TextReport;

/// The maximum number of notices.
const ROWS: usize = 8;

impl ToText for JobReport {
    /// The report for a terminal. `verbose` prints all ranks and the whole comparison.
    fn to_text(&self, options: &TextOptions) -> String {
        let mut report = TextReport::new(options);
        report.heading(&title(self));
        report.verdict(&self.verdict);
        report.blank();
        if options.verbose {
            report.rank_rows(&self.table, Listing::Full);
            report.rank_facts_in_full(&self.table, &[]);
        } else {
            report.rank_rows(&self.table, Listing::Short("memtrace report DIR --ranks"));
            report.rank_facts(&self.table);
        }
        report.clocks(&self.clocks);
        if !self.notices.is_empty() {
            report.blank();
        }
        self.notices.iter().take(ROWS).for_each(|notice| report.note(notice));
        if self.notices.len() > ROWS {
            report.note(&format!("{} more remarks: see --json", count_text((self.notices.len() - ROWS) as u64)));
        }
        report.text()
    }
}

fn title(report: &JobReport) -> String {
    let count = report.table.ranks.len();
    let runs = number_text(report.runs.len() as u64, "run");
    let ranks = number_text(count as u64, "rank");
    let of = report.table.world_size.filter(|size| *size as usize != count);
    let of = of.map(|size| format!(" of {}", count_text(size.into()))).unwrap_or_default();
    let hosts = match report.table.hosts.len() {
        0 => String::new(),
        hosts => format!(" on {}", number_text(hosts as u64, "host")),
    };
    format!("memtrace report    job {} ({})    {ranks}{of}{hosts}, {runs}", report.job, report.job_source)
}

impl TextReport {
    fn clocks(&mut self, clocks: &[HostClock]) {
        let Some(farthest) = clocks.iter().max_by_key(|clock| clock.later_ns.unsigned_abs()) else { return };
        self.blank();
        let later = clocks.iter().map(|clock| clock.later_ns);
        let (low, high) = (later.clone().min().unwrap_or(0).min(0), later.max().unwrap_or(0).max(0));
        self.note(&format!(
            "by the clocks of the hosts, steps begin within {} (largest: {}, median of {}); this is clock difference \
             and waiting together",
            milliseconds(high.abs_diff(low)),
            farthest.host,
            number_text(farthest.common_steps, "common step")
        ));
        let proven: Vec<&HostClock> = clocks.iter().filter(|clock| clock.differs_at_least_ns > 0).collect();
        for clock in proven.iter().take(ROWS) {
            self.note(&format!(
                "the clock of {} differs by at least {}, if each step waits for all ranks",
                clock.host,
                milliseconds(clock.differs_at_least_ns)
            ));
        }
    }
}

fn milliseconds(ns: u64) -> String {
    format!("{:.1} ms", ns as f64 / 1e6)
}
