//! The verdict of a job: an out-of-memory error, the rank with the highest peak, how the ranks ended, and which are
//! missing.

use memtrace_insight::units::number_text;

use crate::conclusions::{VerdictStatus, VerdictSummary};
use crate::rank_sentences::{common_failure, rank_sentences};
use crate::rank_table::{RankSummary, RankTable};

pub(super) fn verdict(table: &RankTable) -> VerdictSummary {
    let mut verdict = VerdictSummary::default();
    let Some(first) = table.ranks.first() else {
        verdict.remarks.push("No rank recorded memory.".to_owned());
        return verdict;
    };
    let ooms = table.ranks.iter().filter(|rank| rank.oom_count > 0).count();
    if ooms > 0 {
        let others =
            if ooms > 1 { format!(" and on {} more", number_text(ooms as u64 - 1, "rank")) } else { String::new() };
        let text = format!("CUDA out of memory on rank {}{}{others}", first.rank, place(first));
        verdict.state(VerdictStatus::Failed, &text);
    }
    if let Some(text) = common_failure(table) {
        verdict.state(VerdictStatus::Failed, &text);
    }
    verdict.remarks.extend(rank_sentences(table));
    verdict
}

/// The device and the host of a rank.
fn place(rank: &RankSummary) -> String {
    let device = match rank.device {
        Some(device) if device >= 0 => format!(", GPU {device}"),
        Some(_) => ", CPU".to_owned(),
        None => String::new(),
    };
    let host = rank.host.as_ref().map(|host| format!(", {host}")).unwrap_or_default();
    format!("{device}{host}")
}
