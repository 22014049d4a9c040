//! The ranks of a job as text: the table of ranks and phases, worst rank first.

use memtrace_insight::passes::Phase;
use memtrace_summary::{
    HostClock, JobImbalance, JobRank, JobReport, count_text, line_what, number_text, share_text, signed_size_text,
    size_text,
};

use crate::style::{TextOptions, ToText};
use crate::table::{Align, Table};
use crate::text_report::TextReport;

/// The number of ranks that a short table has: the worst ones, besides the median and the best.
const WORST: usize = 4;
/// The number of rows of other lists.
const ROWS: usize = 8;
/// A difference of peaks below one in this many parts is none.
const EQUAL: u64 = 100;

impl ToText for JobReport {
    /// The report for a terminal. `verbose` prints all ranks.
    fn to_text(&self, options: &TextOptions) -> String {
        let mut report = TextReport::new(options);
        report.heading(&title(self));
        for line in verdict(self) {
            report.line(line);
        }
        report.blank();
        let shown = shown_ranks(self, options.verbose);
        for line in table(&shown).lines(2, report.width, report.style) {
            report.lines.push(line);
        }
        if let Some(text) = others_text(self, &shown) {
            report.line(format!("  {text}"));
        }
        report.differences(self);
        report.other_processes(self);
        report.clocks(&self.clocks);
        if self.notices.len() + usize::from(self.missing_ranks_count > 0) > 0 {
            report.blank();
        }
        if self.missing_ranks_count > 0 {
            report.note(&missing_text(self));
        }
        self.notices.iter().take(ROWS).for_each(|notice| report.note(notice));
        if self.notices.len() > ROWS {
            report.note(&format!("{} more remarks: see --json", count_text((self.notices.len() - ROWS) as u64)));
        }
        report.text()
    }
}

fn title(report: &JobReport) -> String {
    let hosts: std::collections::BTreeSet<&str> = report.ranks.iter().map(|rank| rank.host.as_str()).collect();
    let runs = number_text(report.runs.len() as u64, "run");
    let ranks = number_text(report.ranks.len() as u64, "rank");
    let of = report.world_size.filter(|size| *size as usize != report.ranks.len());
    let of = of.map(|size| format!(" of {}", count_text(size.into()))).unwrap_or_default();
    let hosts = number_text(hosts.len() as u64, "host");
    format!("memtrace report    job {} ({})    {ranks}{of} on {hosts}, {runs}", report.job, report.job_source)
}

/// What matters most: an out-of-memory error, else the rank with the highest peak.
pub(crate) fn verdict(report: &JobReport) -> Vec<String> {
    let Some(first) = report.ranks.first() else { return vec!["no rank recorded memory".to_owned()] };
    let ooms = report.ranks.iter().filter(|rank| rank.oom_count > 0).count();
    let mut lines = Vec::new();
    if ooms > 0 {
        let others =
            if ooms > 1 { format!(" and on {} more", number_text(ooms as u64 - 1, "rank")) } else { String::new() };
        lines.push(format!("x CUDA out of memory on rank {}, {}, {}{others}", first.rank, device(first), host(first)));
    }
    lines.extend(report.imbalance.map(|imbalance| imbalance_text(report, &imbalance)));
    lines
}

fn imbalance_text(report: &JobReport, imbalance: &JobImbalance) -> String {
    let JobImbalance { worst_rank, max_bytes, median_bytes, min_bytes, .. } = *imbalance;
    let more = max_bytes.saturating_sub(median_bytes);
    if max_bytes.saturating_sub(min_bytes) < max_bytes / EQUAL {
        return format!("the peaks of all ranks are equal within 1 %: {}", size_text(max_bytes));
    }
    let place = report.ranks.iter().find(|rank| rank.rank == worst_rank).map(host).unwrap_or_default();
    format!(
        "rank {worst_rank}, {place}, has the highest peak: {}, {} ({}) above the median",
        size_text(max_bytes),
        size_text(more),
        share_text(more, median_bytes).trim()
    )
}

fn host(rank: &JobRank) -> String {
    if rank.host.is_empty() { "host unknown".to_owned() } else { rank.host.clone() }
}

fn device(rank: &JobRank) -> String {
    if rank.device < 0 { "CPU".to_owned() } else { format!("GPU {}", rank.device) }
}

/// The ranks of the table: all, or the worst ones, the median and the best.
fn shown_ranks(report: &JobReport, all: bool) -> Vec<&JobRank> {
    if all || report.ranks.len() <= WORST + 3 {
        return report.ranks.iter().collect();
    }
    let named = report.imbalance.map(|imbalance| [imbalance.median_rank, imbalance.best_rank]).unwrap_or_default();
    let is_shown = |(at, rank): &(usize, &JobRank)| *at < WORST || named.contains(&rank.rank);
    report.ranks.iter().enumerate().filter(is_shown).map(|(_, rank)| rank).collect()
}

fn table(ranks: &[&JobRank]) -> Table {
    let peak =
        |rank: &JobRank, phase: Phase| rank.phases.iter().find(|row| row.phase == phase).map(|row| row.peak_bytes);
    let phases: Vec<Phase> = Phase::ALL
        .into_iter()
        .filter(|phase| ranks.iter().any(|rank| peak(rank, *phase).is_some_and(|p| p > 0)))
        .collect();
    let titles: Vec<String> = phases.iter().map(|phase| capitalized(phase.name())).collect();
    let mut head = vec![("Rank", Align::Right), ("Peak", Align::Right), ("Reserved", Align::Right)];
    head.extend(titles.iter().map(|title| (title.as_str(), Align::Right)));
    head.extend([("OOM", Align::Right), ("Device", Align::Left), ("Host", Align::Left)]);
    let mut table = Table::verbatim(&head);
    for rank in ranks {
        let mut cells = vec![rank.rank.to_string(), size_text(rank.peak_bytes), size_text(rank.reserved_bytes)];
        cells.extend(phases.iter().map(|phase| peak(rank, *phase).map_or_else(String::new, size_text)));
        let more = rank.other_devices.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let ooms = if rank.oom_count > 0 { count_text(rank.oom_count) } else { String::new() };
        cells.extend([ooms, format!("{}{more}", device(rank)), host(rank)]);
        table.row(cells);
    }
    table
}

fn capitalized(name: &str) -> String {
    let mut characters = name.chars();
    characters.next().map(|first| first.to_uppercase().chain(characters).collect()).unwrap_or_default()
}

/// The ranks that the table leaves out.
fn others_text(report: &JobReport, shown: &[&JobRank]) -> Option<String> {
    let left_out: Vec<&JobRank> =
        report.ranks.iter().filter(|rank| !shown.iter().any(|other| other.rank == rank.rank)).collect();
    let peaks = || left_out.iter().map(|rank| rank.peak_bytes);
    let (low, high) = (peaks().min()?, peaks().max()?);
    let others = format!("{} others", count_text(left_out.len() as u64));
    Some(if high - low < high / EQUAL {
        format!("{others} have peaks within 1 % of {}; --ranks lists them", size_text(high))
    } else {
        format!("{others} have peaks from {} to {}; --ranks lists them", size_text(low), size_text(high))
    })
}

fn missing_text(report: &JobReport) -> String {
    // Neighbors as ranges: 3, 8-15.
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for rank in &report.missing_ranks {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*rank) => *last = *rank,
            _ => ranges.push((*rank, *rank)),
        }
    }
    let text = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    let list = ranges.iter().map(text).collect::<Vec<_>>().join(", ");
    let more = if report.missing_ranks_count > report.missing_ranks.len() as u64 { ", ..." } else { "" };
    format!("{} without a recording: {list}{more}", number_text(report.missing_ranks_count, "rank"))
}

impl TextReport {
    fn differences(&mut self, report: &JobReport) {
        let Some(comparison) = &report.worst_against_median else { return };
        self.blank();
        self.list(&format!(
            "Rank {} beside rank {}, the median, at their peaks",
            comparison.rank, comparison.than_rank
        ));
        let mut lines: Vec<_> = comparison.by_line.iter().filter(|line| line.change.difference_bytes != 0).collect();
        lines.sort_by_key(|line| std::cmp::Reverse(line.change.difference_bytes.unsigned_abs()));
        for line in lines.iter().take(ROWS) {
            self.line(format!("    {:>9}  {}", signed_size_text(line.change.difference_bytes), line_what(line)));
        }
        if lines.len() > ROWS {
            self.line(format!("    {} more lines: see --json", count_text((lines.len() - ROWS) as u64)));
        }
    }

    fn other_processes(&mut self, report: &JobReport) {
        if report.other_processes.is_empty() {
            return;
        }
        self.blank();
        self.list("Processes that are no rank");
        for process in report.other_processes.iter().take(ROWS) {
            let rank = process.rank.map(|rank| format!(", inherited rank {rank}")).unwrap_or_default();
            self.line(format!(
                "    {:>9}  GPU {}, pid {}{rank}, {}",
                size_text(process.peak_bytes),
                process.device,
                process.pid,
                process.host
            ));
        }
        let more = report.other_processes.len().saturating_sub(ROWS);
        if more > 0 {
            self.line(format!("    {} more: see --json", count_text(more as u64)));
        }
    }

    fn clocks(&mut self, clocks: &[HostClock]) {
        let Some(farthest) = clocks.iter().max_by_key(|clock| clock.later_ns.unsigned_abs()) else { return };
        self.blank();
        let later = clocks.iter().map(|clock| clock.later_ns);
        let (low, high) = (later.clone().min().unwrap_or(0).min(0), later.max().unwrap_or(0).max(0));
        self.note(&format!(
            "by the clocks of the hosts, steps begin within {} (largest: {}, median of {}); this is clock difference and \
             waiting together",
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
