//! The ranks of a launch in plain text: the table, how the ranks differ, and the issues that concern several processes.

use std::collections::BTreeMap;

use memtrace_input::load::Exit;
use memtrace_insight::passes::Phase;
use memtrace_summary::{
    ImbalanceSummary, IssueSummary, LaunchSummary, RankComparison, RankSummary, SharedMemorySummary, Summary,
    line_what, number_text, share_text, signal_name, signed_size_text, size_text,
};

use crate::table::{Align, Table};
use crate::text_report::TextReport;

/// Up to this many ranks are listed one by one. Of more, the report lists the worst, the median and the best.
const LISTED_RANKS: usize = 8;
const WORST_RANKS: usize = 4;
/// The maximum number of lines and categories of a comparison.
const COMPARED: usize = 3;
/// The maximum number of ranks that a sentence names.
const NAMED_RANKS: usize = 8;
/// The end of the text about a rank that ran out of memory.
const AFTER_OOM: &str = " after an out-of-memory error";
/// The phases that have a column.
const PHASES: [Phase; 4] = [Phase::Load, Phase::Forward, Phase::Backward, Phase::Optimizer];

/// Formats ranks: `rank 3`, `ranks 0, 2-7`. `ranks` are in ascending order.
fn ranks_text(ranks: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &rank in ranks {
        match parts.last_mut() {
            Some((_, last)) if rank == last.saturating_add(1) => *last = rank,
            _ => parts.push((rank, rank)),
        }
    }
    let text = |(first, last): &(u32, u32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let mut texts: Vec<String> = parts.iter().take(NAMED_RANKS).map(text).collect();
    if parts.len() > NAMED_RANKS {
        texts.push("...".to_owned());
    }
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, texts.join(", "))
}

fn end_text(rank: &RankSummary) -> String {
    let end = match rank.exit {
        Exit { signal: Some(signal), .. } => format!("killed by {}", signal_name(signal)),
        Exit { code: Some(0), .. } => "finished".to_owned(),
        Exit { code: Some(code), .. } => format!("exit status {code}"),
        _ => "end unknown".to_owned(),
    };
    if rank.ended_by_oom == Some(true) { format!("{end}{AFTER_OOM}") } else { end }
}

/// The sentences about the ranks that the verdict adds.
pub(crate) fn launch_sentences(launch: &LaunchSummary) -> Vec<String> {
    let mut sentences = Vec::new();
    sentences
        .extend(launch.imbalance.filter(|_| launch.ranks.len() > 1).map(|imbalance| worst_text(launch, &imbalance)));
    // Ranks that ended in the same way are named together.
    let mut ends: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for rank in &launch.ranks {
        ends.entry(end_text(rank)).or_default().push(rank.rank);
    }
    if ends.len() > 1 {
        let mut ends: Vec<(String, Vec<u32>)> = ends.into_iter().collect();
        ends.iter_mut().for_each(|(_, ranks)| ranks.sort_unstable());
        // An out-of-memory error, then the rarest end: it is usually the reason of the others.
        ends.sort_by_key(|(end, ranks)| {
            (end == "finished", !end.ends_with(AFTER_OOM), ranks.len(), ranks.first().copied())
        });
        let texts: Vec<String> = ends.iter().map(|(end, ranks)| format!("{} {end}", ranks_text(ranks))).collect();
        sentences.push(format!("The ranks ended differently: {}.", texts.join("; ")));
    }
    match &launch.issues[..] {
        [] => {}
        [only] => sentences.push(format!("1 issue in the launch: {}.", only.issue.rule)),
        [first, ..] => {
            sentences.push(format!("{} issues in the launch, first: {}.", launch.issues.len(), first.issue.rule));
        }
    }
    match (launch.unrecorded_ranks_count, &launch.unrecorded_ranks[..]) {
        (0, _) => {}
        (count, listed) if count == listed.len() as u64 => {
            let verb = if count == 1 { "has" } else { "have" };
            sentences.push(format!("No recording: {} {verb} none, or used no GPU memory.", ranks_text(listed)));
        }
        (count, listed) => {
            sentences
                .push(format!("No recording: {count} ranks have none, the first is {}.", ranks_text(&listed[..1])));
        }
    }
    sentences
}

/// Which rank is the worst, by how much, and what that costs.
fn worst_text(launch: &LaunchSummary, imbalance: &ImbalanceSummary) -> String {
    let ImbalanceSummary { worst_rank, median_rank, max_bytes, median_bytes, difference_bytes, .. } = *imbalance;
    let count = launch.ranks.len();
    if !imbalance.matters() {
        return format!(
            "{count} ranks, within {} of each other: the highest peak is {} on rank {worst_rank}.",
            share_text(max_bytes - imbalance.min_bytes, max_bytes.max(1)),
            size_text(max_bytes)
        );
    }
    let phase = imbalance.phase.map(|phase| format!(", most of it in {}", phase.name())).unwrap_or_default();
    format!(
        "Worst of {count} ranks: rank {worst_rank}, peak {}, {} ({}) more than the median (rank {median_rank}){phase}.",
        size_text(max_bytes),
        size_text(difference_bytes),
        share_text(difference_bytes, median_bytes.max(1)),
    )
}

fn table() -> Table {
    let mut head = vec![("Rank", Align::Left), ("GPU", Align::Right)];
    head.extend([("Load", Align::Right), ("Forward", Align::Right), ("Backward", Align::Right)]);
    head.extend([
        ("Optimizer", Align::Right),
        ("Peak", Align::Right),
        ("Reserved", Align::Right),
        ("OOM", Align::Left),
    ]);
    Table::new(&head)
}

/// The row of a rank. `several_hosts`: the rank is named with its host.
fn cells(rank: &RankSummary, several_hosts: bool) -> Vec<String> {
    let host = rank.host.as_deref().filter(|_| several_hosts).map(|host| format!(" {host}")).unwrap_or_default();
    let gpu = match rank.device {
        Some(device) if device >= 0 => device.to_string(),
        Some(_) => "CPU".to_owned(),
        None => "-".to_owned(),
    };
    let mut cells = vec![format!("{}{host}", rank.rank), gpu];
    cells.extend(PHASES.iter().map(|phase| rank.phase_peak(*phase).map_or_else(|| "-".to_owned(), size_text)));
    cells.extend([size_text(rank.peak_bytes), size_text(rank.reserved_bytes)]);
    cells.push(if rank.oom_count > 0 { rank.oom_count.to_string() } else { String::new() });
    cells
}

/// The ranks between those that are listed, in one line.
fn others_text(others: &[&RankSummary], median_bytes: u64) -> String {
    let peaks = others.iter().map(|rank| rank.peak_bytes);
    let (low, high) = (peaks.clone().min().unwrap_or(0), peaks.max().unwrap_or(0));
    let furthest = high.saturating_sub(median_bytes).max(median_bytes.saturating_sub(low));
    let share = furthest.saturating_mul(100).div_ceil(median_bytes.max(1));
    let range = match low == high {
        true => size_text(low),
        false => format!("{} to {}", size_text(low), size_text(high)),
    };
    format!("{} others: {range}, within {share} % of the median", others.len())
}

impl TextReport {
    /// Adds the ranks: the worst first, many of them in one line, and what the worst has more than the median.
    pub(crate) fn launch(&mut self, launch: &LaunchSummary) {
        self.blank();
        let several_hosts = launch.hosts.len() > 1;
        let mut table = table();
        match launch.imbalance.filter(|_| launch.ranks.len() > LISTED_RANKS) {
            None => launch.ranks.iter().for_each(|rank| table.row(cells(rank, several_hosts))),
            Some(imbalance) => {
                let (worst, rest) = launch.ranks.split_at(WORST_RANKS);
                worst.iter().for_each(|rank| table.row(cells(rank, several_hosts)));
                let named = [(imbalance.median_rank, "median"), (imbalance.best_rank, "best")];
                for (number, what) in named {
                    if let Some(rank) = rest.iter().find(|rank| rank.rank == number) {
                        let mut cells = cells(rank, several_hosts);
                        if let Some(first) = cells.first_mut() {
                            first.push_str(&format!(" ({what})"));
                        }
                        table.row(cells);
                    }
                }
                let is_named = |rank: &&RankSummary| named.iter().any(|(number, _)| *number == rank.rank);
                let others: Vec<&RankSummary> = rest.iter().filter(|rank| !is_named(rank)).collect();
                if !others.is_empty() {
                    table.caption(others_text(&others, imbalance.median_bytes));
                }
                table.caption("all ranks: memtrace report RUN --section ranks");
            }
        }
        self.lines.extend(table.lines(0, self.width, self.style));
        self.helpers(launch);
        self.imbalance(launch, false);
    }

    /// Adds why the imbalance costs memory, and what the worst rank has more than the median. `is_full`: the comparison
    /// follows in full.
    fn imbalance(&mut self, launch: &LaunchSummary, is_full: bool) {
        let Some(imbalance) = launch.imbalance.filter(ImbalanceSummary::matters) else { return };
        let cost = format!(
            "{} stay unused on the other ranks, because the batch has to fit rank {}",
            size_text(imbalance.unused_bytes),
            imbalance.worst_rank
        );
        self.labelled("Imbalance", &cost);
        let Some(comparison) = launch.worst_against_median.as_ref().filter(|_| !is_full) else { return };
        for (label, text) in comparison_texts(comparison, COMPARED) {
            self.labelled(&label, &text);
        }
    }

    fn helpers(&mut self, launch: &LaunchSummary) {
        let of_ranks = launch.ranks.iter().flat_map(|rank| {
            rank.helpers.iter().map(move |helper| (helper, format!("pid {} of rank {}", helper.pid, rank.rank)))
        });
        let without = launch.without_rank.iter().map(|helper| (helper, format!("pid {}", helper.pid)));
        let mut helpers: Vec<_> = of_ranks.chain(without).collect();
        helpers.sort_by_key(|(helper, _)| (std::cmp::Reverse(helper.peak_bytes), helper.pid));
        let listed: Vec<String> = helpers
            .iter()
            .take(COMPARED)
            .map(|(helper, name)| format!("{name} {}", size_text(helper.peak_bytes)))
            .collect();
        let more = helpers.len().saturating_sub(listed.len());
        let more = if more > 0 { format!(", {more} more") } else { String::new() };
        self.labelled_list("Workers and helpers", &format!("{}{more}", listed.join(", ")));
        for rank in launch.ranks.iter().filter(|rank| !rank.other_attempts.is_empty()) {
            let pids: Vec<String> = rank.other_attempts.iter().map(u32::to_string).collect();
            self.labelled_list("Restarted", &format!("rank {}; other processes: {}", rank.rank, pids.join(", ")));
        }
    }

    /// Adds the issues that concern several processes.
    pub(crate) fn launch_issues(&mut self, launch: Option<&LaunchSummary>, count: usize) {
        let issues: Vec<IssueSummary> =
            launch.iter().flat_map(|one| &one.issues).map(|one| one.issue.clone()).collect();
        self.issues(&issues, count, Some("the launch"), None);
    }

    /// The ranks in full.
    pub(crate) fn ranks_section(&mut self, summary: &Summary) {
        self.blank();
        let Some(launch) = &summary.launch else {
            return self.line("one process recorded events: there is nothing to compare".to_owned());
        };
        if launch.ranks.is_empty() {
            self.line("no process has a rank".to_owned());
        } else {
            let mut table = table();
            launch.ranks.iter().for_each(|rank| table.row(cells(rank, launch.hosts.len() > 1)));
            self.lines.extend(table.lines(0, self.width, self.style));
        }
        self.blank();
        self.helpers(launch);
        launch_sentences(launch).iter().for_each(|text| self.labelled("Ranks", text));
        self.imbalance(launch, true);
        if let Some(comparison) = &launch.worst_against_median {
            self.blank();
            let (worst, median) = (name(comparison.worst.rank), name(comparison.median.rank));
            self.heading(&format!("What {worst} has more than {median} at its peak"));
            for row in &comparison.by_category {
                let what = row.category.map_or("without a recorded event", |category| category.plural());
                self.line(format!("    {:>10}  {what}", signed_size_text(row.change.difference_bytes)));
            }
            self.list("By line");
            for row in &comparison.by_line {
                self.line(format!("    {:>10}  {}", signed_size_text(row.change.difference_bytes), line_what(row)));
            }
        }
        self.launch_issues(Some(launch), usize::MAX);
        self.shared_memory(&launch.shared_memory);
    }

    fn shared_memory(&mut self, shared: &[SharedMemorySummary]) {
        if shared.is_empty() {
            return;
        }
        self.blank();
        self.heading("Memory of other processes (CUDA IPC)");
        for one in shared {
            let importer = process(one.importer_rank, one.importer_pid);
            let exporter = one
                .exporter_pid
                .map_or_else(|| "a process that is not known".to_owned(), |pid| process(one.exporter_rank, pid));
            let kept = match one.kept_after_free_bytes {
                0 => String::new(),
                bytes => format!("; {} of it after {exporter} had freed it", size_text(bytes)),
            };
            let at_peak =
                one.at_exporter_peak_bytes.map(|bytes| format!("{} at the peak of {exporter}, ", size_text(bytes)));
            let text = format!(
                "{importer} opened up to {} of {exporter} ({}{} at the end, {}){kept}",
                size_text(one.peak_bytes),
                at_peak.unwrap_or_default(),
                size_text(one.end_bytes),
                number_text(one.imports, "import"),
            );
            self.item(2, &text);
        }
    }
}

fn name(rank: Option<u32>) -> String {
    rank.map_or_else(|| "the process".to_owned(), |rank| format!("rank {rank}"))
}

fn process(rank: Option<u32>, pid: u32) -> String {
    rank.map_or_else(|| format!("pid {pid}"), |rank| format!("rank {rank} (pid {pid})"))
}

/// What the worst rank has more than the median: by category, then by line.
fn comparison_texts(comparison: &RankComparison, count: usize) -> Vec<(String, String)> {
    let label = format!("{} against {}", name(comparison.worst.rank), name(comparison.median.rank));
    let categories: Vec<String> = comparison
        .by_category
        .iter()
        .take(count)
        .map(|row| {
            let what = row.category.map_or("without a recorded event", |category| category.plural());
            format!("{} {what}", signed_size_text(row.change.difference_bytes))
        })
        .collect();
    let mut texts = vec![(label, categories.join(", "))];
    for (at, row) in comparison.by_line.iter().take(count).enumerate() {
        let label = if at == 0 { "Largest differences" } else { "" };
        texts.push((label.to_owned(), format!("{} {}", signed_size_text(row.change.difference_bytes), line_what(row))));
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_as_ranges() {
        assert_eq!(ranks_text(&[3]), "rank 3");
        assert_eq!(ranks_text(&[0, 1, 3, 5, 6, 7]), "ranks 0, 1, 3, 5-7");
        let even: Vec<u32> = (0..40).step_by(2).collect();
        assert_eq!(ranks_text(&even), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ...");
    }
}
