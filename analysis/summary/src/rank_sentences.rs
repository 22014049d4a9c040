//! Sentences about the ranks of a launch or of a job: how they differ, how they ended, and which are missing.

use std::collections::BTreeMap;

use memtrace_input::load::RankSource;

use crate::launch::LaunchSummary;
use crate::rank_table::{ImbalanceSummary, RankSummary, RankTable};
use memtrace_insight::units::{share_text, size_text};

/// The maximum number of ranks that a sentence names.
const NAMED_RANKS: usize = 8;
/// The end of the text about a rank that ran out of memory.
const AFTER_OOM: &str = " after an out-of-memory error";
/// The end of a process with the exit status 0.
const FINISHED: &str = "finished";

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
    let end = rank.exit.text().unwrap_or_else(|| "end unknown".to_owned());
    if rank.ended_by_oom == Some(true) { format!("{end}{AFTER_OOM}") } else { end }
}

/// How the ranks ended: the ends, each with its ranks in ascending order.
fn ends(table: &RankTable) -> Vec<(String, Vec<u32>)> {
    let mut ends: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for rank in &table.ranks {
        ends.entry(end_text(rank)).or_default().push(rank.rank);
    }
    let mut ends: Vec<(String, Vec<u32>)> = ends.into_iter().collect();
    ends.iter_mut().for_each(|(_, ranks)| ranks.sort_unstable());
    // An out-of-memory error, then the rarest end: it is usually the reason of the others.
    ends.sort_by_key(|(end, ranks)| (end == FINISHED, !end.ends_with(AFTER_OOM), ranks.len(), ranks.first().copied()));
    ends
}

/// How all ranks failed, if they did so in the same way.
pub(crate) fn common_failure(table: &RankTable) -> Option<String> {
    let is_failure = |rank: &RankSummary| rank.exit.signal.is_some() || rank.exit.code.is_some_and(|code| code != 0);
    match &ends(table)[..] {
        [(end, ranks)] if table.ranks.first().is_some_and(is_failure) => {
            Some(format!("Failed: {} {end}.", ranks_text(ranks)))
        }
        _ => None,
    }
}

/// The sentences about the ranks that a verdict adds.
pub(crate) fn rank_sentences(table: &RankTable) -> Vec<String> {
    let mut sentences = Vec::new();
    sentences.extend(table.imbalance.filter(|_| table.ranks.len() > 1).map(|imbalance| worst_text(table, &imbalance)));
    let by_order = |rank: &&RankSummary| rank.rank_source == Some(RankSource::FileOrder);
    let mut numbered: Vec<u32> = table.ranks.iter().filter(by_order).map(|rank| rank.rank).collect();
    if !numbered.is_empty() {
        numbered.sort_unstable();
        let text = ranks_text(&numbered);
        sentences.push(format!("The order of the files gives {text}; a name such as rank0.pickle gives the rank."));
    }
    let ends = ends(table);
    // Ranks that ended in the same way are named together.
    if ends.len() > 1 {
        let texts: Vec<String> = ends.iter().map(|(end, ranks)| format!("{} {end}", ranks_text(ranks))).collect();
        sentences.push(format!("The ranks ended differently: {}.", texts.join("; ")));
    }
    match (table.unrecorded_ranks_count, &table.unrecorded_ranks[..]) {
        (0, _) | (_, []) => {}
        (count, listed) if count == listed.len() as u64 => {
            let verb = if count == 1 { "has" } else { "have" };
            sentences.push(format!("No recording: {} {verb} none, or used no GPU memory.", ranks_text(listed)));
        }
        (count, [first, ..]) => {
            sentences.push(format!("No recording: {count} ranks have none, the first is {}.", ranks_text(&[*first])));
        }
    }
    sentences
}

/// Which rank is the worst, by how much, and what that costs.
fn worst_text(table: &RankTable, imbalance: &ImbalanceSummary) -> String {
    let ImbalanceSummary { worst_rank, median_rank, max_bytes, median_bytes, difference_bytes, .. } = *imbalance;
    let count = table.ranks.len();
    if !imbalance.matters() {
        return format!(
            "{count} ranks, within {} of each other: the highest peak is {} on rank {worst_rank}.",
            share_text(max_bytes - imbalance.min_bytes, max_bytes.max(1)),
            size_text(max_bytes)
        );
    }
    let several_hosts = table.hosts.len() > 1;
    let host = table.rank(worst_rank).and_then(|rank| rank.host.as_ref()).filter(|_| several_hosts);
    let host = host.map(|host| format!(" on {host}")).unwrap_or_default();
    let phase = imbalance.phase.map(|phase| format!(", most of it in {}", phase.name())).unwrap_or_default();
    format!(
        "Worst of {count} ranks: rank {worst_rank}{host}, peak {}, {} ({}) more than the median (rank \
         {median_rank}){phase}.",
        size_text(max_bytes),
        size_text(difference_bytes),
        share_text(difference_bytes, median_bytes.max(1)),
    )
}

/// The sentences about the launch that the verdict adds.
pub fn launch_sentences(launch: &LaunchSummary) -> Vec<String> {
    let mut sentences = rank_sentences(&launch.table);
    match &launch.issues[..] {
        [] => {}
        [only] => sentences.push(format!("1 issue in the launch: {}.", only.issue.rule)),
        [first, ..] => {
            sentences.push(format!("{} issues in the launch, first: {}.", launch.issues.len(), first.issue.rule));
        }
    }
    sentences
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
