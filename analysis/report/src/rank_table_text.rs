//! The ranks of a launch or of a job in plain text: the table of ranks and phases, how the ranks differ, and the
//! processes that are no ranks.

use memtrace_insight::passes::Phase;
use memtrace_summary::{
    HelperSummary, ImbalanceSummary, RankComparison, RankSummary, RankTable, line_what, number_text, signed_size_text,
    size_text,
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
/// The phases that have a column, besides those of the peaks.
const PHASES: [Phase; 4] = [Phase::Load, Phase::Forward, Phase::Backward, Phase::Optimizer];

/// Which ranks and phases a table lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Listing<'a> {
    /// All ranks and phases.
    Full,
    /// Of many ranks, the worst ones, the median and the best. The text says how to list all.
    Short(&'a str),
}

/// The phases that have a column: all in which a rank has memory, or the common ones and those of the peaks.
fn phase_columns(ranks: &[&RankSummary], is_full: bool) -> Vec<Phase> {
    let has_memory = |phase: &Phase| ranks.iter().any(|rank| rank.phase_peak(*phase).is_some_and(|peak| peak > 0));
    let is_peak = |phase: &Phase| ranks.iter().any(|rank| rank.peak_phase == Some(*phase));
    let is_shown = |phase: &Phase| has_memory(phase) && (is_full || PHASES.contains(phase) || is_peak(phase));
    Phase::ALL.into_iter().filter(is_shown).collect()
}

fn table_of(phases: &[Phase]) -> Table {
    let titles: Vec<String> = phases.iter().map(|phase| capitalized(phase.name())).collect();
    let mut head = vec![("Rank", Align::Left), ("GPU", Align::Right)];
    head.extend(titles.iter().map(|title| (title.as_str(), Align::Right)));
    head.extend([("Peak", Align::Right), ("Reserved", Align::Right), ("OOM", Align::Left)]);
    Table::new(&head)
}

fn capitalized(name: &str) -> String {
    let mut characters = name.chars();
    characters.next().map(|first| first.to_uppercase().chain(characters).collect()).unwrap_or_default()
}

/// The row of a rank. `several_hosts` means that the rank is named with its host.
fn cells(rank: &RankSummary, phases: &[Phase], several_hosts: bool) -> Vec<String> {
    let host = rank.host.as_deref().filter(|_| several_hosts).map(|host| format!(" {host}")).unwrap_or_default();
    let gpu = match rank.device {
        Some(device) if device >= 0 => device.to_string(),
        Some(_) => "CPU".to_owned(),
        None => "-".to_owned(),
    };
    let more = match rank.other_devices.len() {
        0 => String::new(),
        count => format!(" and {count} more"),
    };
    let mut cells = vec![format!("{}{host}", rank.rank), format!("{gpu}{more}")];
    cells.extend(phases.iter().map(|phase| rank.phase_peak(*phase).map_or_else(|| "-".to_owned(), size_text)));
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
    /// Adds the table of ranks and phases, the worst rank first.
    pub(crate) fn rank_rows(&mut self, ranks: &RankTable, listing: Listing<'_>) {
        let several_hosts = ranks.hosts.len() > 1;
        let (listed, others) = match listing {
            Listing::Short(_) if ranks.ranks.len() > LISTED_RANKS => ranks.ranks.split_at(WORST_RANKS),
            _ => (&ranks.ranks[..], &[][..]),
        };
        let (median_rank, best_rank, median_bytes) = ranks
            .imbalance
            .map_or((None, None, 0), |one| (Some(one.median_rank), Some(one.best_rank), one.median_bytes));
        let mark = |rank: &&RankSummary| match Some(rank.rank) {
            number if number == median_rank => Some("median"),
            number if number == best_rank => Some("best"),
            _ => None,
        };
        let (mut named, others): (Vec<&RankSummary>, Vec<&RankSummary>) =
            others.iter().partition(|rank| mark(rank).is_some());
        named.sort_by_key(|rank| mark(rank) != Some("median"));
        let shown: Vec<&RankSummary> = listed.iter().chain(named.iter().copied()).collect();
        let fill = |is_full: bool| {
            let phases = phase_columns(&shown, is_full);
            let mut table = table_of(&phases);
            for (at, rank) in shown.iter().enumerate() {
                let mut cells = cells(rank, &phases, several_hosts);
                if let (Some(first), Some(mark)) = (cells.first_mut(), mark(rank).filter(|_| at >= listed.len())) {
                    first.push_str(&format!(" ({mark})"));
                }
                table.row(cells);
            }
            table
        };
        let mut table = fill(listing == Listing::Full);
        if table.width() > self.width {
            table = fill(false);
        }
        if !others.is_empty() {
            table.caption(others_text(&others, median_bytes));
        }
        if let Listing::Short(how) = listing
            && ranks.ranks.len() > LISTED_RANKS
        {
            table.caption(format!("all ranks: {how}"));
        }
        self.lines.extend(table.lines(0, self.width, self.style));
    }

    /// Adds the processes that are no ranks, what the imbalance costs, and what the worst rank has more than the
    /// median.
    pub(crate) fn rank_facts(&mut self, table: &RankTable) {
        self.helpers(table);
        self.imbalance(table, false);
    }

    /// Adds the same as [`Self::rank_facts`], with the whole comparison. `sentences` stand between.
    pub(crate) fn rank_facts_in_full(&mut self, table: &RankTable, sentences: &[String]) {
        self.helpers(table);
        sentences.iter().for_each(|text| self.labelled("Ranks", text));
        self.imbalance(table, true);
        let Some(comparison) = &table.worst_against_median else { return };
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

    /// Adds why the imbalance costs memory, and what the worst rank has more than the median. `is_full` means that the
    /// comparison follows in full.
    fn imbalance(&mut self, table: &RankTable, is_full: bool) {
        let Some(imbalance) = table.imbalance.filter(ImbalanceSummary::matters) else { return };
        let cost = format!(
            "{} stay unused on the other ranks, because the batch has to fit rank {}",
            size_text(imbalance.unused_bytes),
            imbalance.worst_rank
        );
        self.labelled("Imbalance", &cost);
        let Some(comparison) = table.worst_against_median.as_ref().filter(|_| !is_full) else { return };
        for (label, text) in comparison_texts(comparison, COMPARED) {
            self.labelled(&label, &text);
        }
    }

    /// Adds the workers and helpers, largest first, and the ranks that were started several times.
    fn helpers(&mut self, table: &RankTable) {
        let of_ranks = table.ranks.iter().flat_map(|rank| {
            rank.helpers.iter().map(move |helper| (helper, format!("pid {} of rank {}", helper.pid, rank.rank)))
        });
        let without =
            table.without_rank.iter().map(|helper| (helper, format!("pid {}{}", helper.pid, host_text(helper))));
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
        for rank in table.ranks.iter().filter(|rank| !rank.other_attempts.is_empty()) {
            let pids: Vec<String> = rank.other_attempts.iter().map(u32::to_string).collect();
            self.labelled_list("Restarted", &format!("rank {}; other processes: {}", rank.rank, pids.join(", ")));
        }
        let of_runs: Vec<&RankSummary> = table.ranks.iter().filter(|rank| !rank.other_runs.is_empty()).collect();
        for rank in of_runs.iter().take(NAMED_RANKS) {
            let runs = rank.other_runs.join(", ");
            self.labelled_list("Recorded again", &format!("rank {}; other runs: {runs}", rank.rank));
        }
        if of_runs.len() > NAMED_RANKS {
            self.labelled("", &format!("{} more", number_text((of_runs.len() - NAMED_RANKS) as u64, "rank")));
        }
    }
}

/// The host of a process that belongs to no rank.
fn host_text(helper: &HelperSummary) -> String {
    helper.host.as_ref().map(|host| format!(" on {host}")).unwrap_or_default()
}

fn name(rank: Option<u32>) -> String {
    rank.map_or_else(|| "the process".to_owned(), |rank| format!("rank {rank}"))
}

/// The memory that the worst rank has more than the median: by category, then by line.
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
