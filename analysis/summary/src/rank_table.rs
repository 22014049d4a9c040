//! The ranks of a launch or of a job beside each other: the part that `summary.json`'s `launch` and the report of a job
//! have in common.
//!
//! The doc comments of these types are the descriptions in the JSON Schema.

use std::cmp::Reverse;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::diff::{CategoryChange, DevicePair, DiffPeak, LineChange};
use memtrace_input::load::{Exit, RankSource};
use memtrace_insight::passes::Phase;

/// The ranks of a launch or of a job, and how far they differ.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RankTable {
    /// The number of ranks of the job, as its processes report it. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world_size: Option<u32>,
    /// The names of the hosts, in alphabetical order.
    pub hosts: Vec<String>,
    /// The recorded ranks. Ranks with out-of-memory errors come first, then those with the highest peak of allocated
    /// bytes.
    pub ranks: Vec<RankSummary>,
    /// How far the peaks of the ranks differ. Absent with fewer than two ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub imbalance: Option<ImbalanceSummary>,
    /// The memory that the rank with the highest peak has more than the median rank. Absent if their peaks differ by
    /// less than a hundredth, and without their traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst_against_median: Option<RankComparison>,
    /// The number of ranks that recorded nothing, as far as it is known. The ranks of other hosts count only in a
    /// report about all hosts.
    pub unrecorded_ranks_count: u64,
    /// The first 64 of these ranks, in ascending order.
    pub unrecorded_ranks: Vec<u32>,
    /// The processes that belong to no rank, by run and process id: workers and helpers whose ancestors have no rank.
    pub without_rank: Vec<HelperSummary>,
}

/// One rank.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RankSummary {
    /// The rank.
    pub rank: u32,
    /// The source of the rank. Absent if the recording is of a version that does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank_source: Option<RankSource>,
    /// The rank on its host. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_rank: Option<u32>,
    /// The number of the host in the job. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_rank: Option<u32>,
    /// The host name. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The name of its run. Absent in the summary of one run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// The process id on its host.
    pub pid: u32,
    /// The file name of the trace in its run folder.
    pub trace: String,
    /// The rank's own device: the one with its local rank, else the one with most allocations in forward and backward
    /// passes, else the one with the highest peak. -1 is the CPU. Absent if the rank allocated nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<i16>,
    /// The PCI bus id of that device. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci_bus_id: Option<String>,
    /// The total memory of that device, in bytes. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// The highest number of allocated bytes on that device.
    pub peak_bytes: u64,
    /// The highest number of reserved bytes on that device. It can belong to another point in time than `peak_bytes`.
    pub reserved_bytes: u64,
    /// The sum of the peaks of memory outside PyTorch's caching allocator on that device, by library. Absent if it is
    /// unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outside_pytorch_bytes: Option<u64>,
    /// The highest number of allocated bytes in each phase, over all steps, in the order of `load`, `data`, `forward`
    /// and so on.
    pub phases: Vec<RankPhasePeak>,
    /// The phase of the peak. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_phase: Option<Phase>,
    /// The step of the peak, counted from 0. Absent before the first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_step: Option<u32>,
    /// The number of steps. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u32>,
    /// The number of out-of-memory errors of the process.
    pub oom_count: u64,
    /// Whether an out-of-memory error ended the process. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_by_oom: Option<bool>,
    /// The exit status or signal.
    pub exit: Exit,
    /// The number of recorded events.
    pub events: u64,
    /// The number of events that are known to be missing.
    pub lost_events: u64,
    /// The other devices on which the process allocated memory, by device.
    pub other_devices: Vec<RankDevice>,
    /// The DataLoader workers and helpers of the rank, by process id.
    pub helpers: Vec<HelperSummary>,
    /// The other processes of the run that had this rank, such as those before a restart, by process id. Their figures
    /// are not included.
    pub other_attempts: Vec<u32>,
    /// The other runs of the job that have this rank, by name. Their figures are not included. The run that started
    /// last counts. Absent in the summary of one run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_runs: Vec<String>,
}

/// A device that is not the rank's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RankDevice {
    /// The device ordinal; -1 is the CPU.
    pub device: i16,
    /// The highest number of allocated bytes.
    pub peak_bytes: u64,
    /// The highest number of reserved bytes.
    pub reserved_bytes: u64,
}

/// The highest number of allocated bytes of a rank in one phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RankPhasePeak {
    /// The phase.
    pub phase: Phase,
    /// The highest number of allocated bytes of the rank's own device during the phase.
    pub peak_bytes: u64,
}

/// A recorded process that is no rank: a worker or helper.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HelperSummary {
    /// The process id.
    pub pid: u32,
    /// The name of its run. Absent in the summary of one run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// The host name. Absent in the summary of one run, and if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The highest number of device bytes that the process allocated, summed over its GPUs.
    pub peak_bytes: u64,
}

/// How far the peaks of the ranks differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ImbalanceSummary {
    /// The rank with the highest peak. Of equal ranks, the first.
    pub worst_rank: u32,
    /// The rank with the median peak. Of an even number of ranks, the lower one.
    pub median_rank: u32,
    /// The rank with the lowest peak. Of equal ranks, the first.
    pub best_rank: u32,
    /// The highest peak.
    pub max_bytes: u64,
    /// The median peak.
    pub median_bytes: u64,
    /// The lowest peak.
    pub min_bytes: u64,
    /// `max_bytes` minus `median_bytes`.
    pub difference_bytes: u64,
    /// The sum, over all ranks, of `max_bytes` minus the peak of the rank: the memory that other ranks do not need when
    /// the batch fits the worst rank.
    pub unused_bytes: u64,
    /// The phase in which the worst rank exceeds the median rank by most. Absent if it exceeds it in none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
}

/// The peak of the rank with the highest peak beside that of the median rank. In the tables, A is the median rank and B
/// is the worst rank.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RankComparison {
    /// The peak of the median rank.
    pub median: DiffPeak,
    /// The peak of the worst rank.
    pub worst: DiffPeak,
    /// The peak of the worst rank minus that of the median rank.
    pub difference_bytes: i64,
    /// The allocated blocks by category, largest difference first. The differences add up to `difference_bytes`.
    pub by_category: Vec<CategoryChange>,
    /// The allocated blocks by line and category, largest difference first: the first 20. Lines without a difference
    /// are left out.
    pub by_line: Vec<LineChange>,
}

/// One hundredth: differences below it are not worth a comparison.
const COMPARED_SHARE: u64 = 100;
/// The maximum number of missing ranks that are listed.
const LISTED_RANKS: usize = 64;
/// The maximum number of lines in the comparison of two ranks.
const COMPARED_LINES: usize = 20;

/// The most bytes that a process took from a device, from its peaks there and those of all owners.
pub(crate) fn used_bytes(allocated: u64, reserved: u64, owners: impl Iterator<Item = u64>) -> u64 {
    allocated.max(reserved).max(owners.fold(0, u64::saturating_add))
}

/// Whether an out-of-memory error ended the process, if it is known. `fatal` says whether each error did.
pub(crate) fn ended_by_oom(fatal: impl Iterator<Item = Option<bool>>) -> Option<bool> {
    let (mut ended, mut is_known) = (false, true);
    for fatal in fatal {
        ended |= fatal == Some(true);
        is_known &= fatal.is_some();
    }
    if ended { Some(true) } else { is_known.then_some(false) }
}

impl RankTable {
    /// The rank whose worker or helper this process is.
    pub(crate) fn helper_of(&self, pid: u32) -> Option<u32> {
        let has = |rank: &&RankSummary| rank.helpers.iter().any(|helper| helper.pid == pid);
        self.ranks.iter().find(has).map(|rank| rank.rank)
    }

    /// The table of these ranks, in any order: sorts them and computes the imbalance and the missing ranks. `expected`
    /// are the ranks that should have recorded something: those of this host, or the whole job. The comparison and
    /// `without_rank` stay empty.
    pub fn of_ranks(
        mut ranks: Vec<RankSummary>,
        world_size: Option<u32>,
        expected: &[std::ops::Range<u32>],
    ) -> RankTable {
        ranks.sort_by_key(|rank| (Reverse((rank.oom_count > 0, rank.peak_bytes)), rank.rank, rank.pid));
        let mut hosts: Vec<String> = ranks.iter().filter_map(|rank| rank.host.clone()).collect();
        hosts.sort();
        hosts.dedup();
        let mut recorded: Vec<u32> = ranks.iter().map(|rank| rank.rank).collect();
        recorded.sort_unstable();
        recorded.dedup();
        // A job can claim any size, so only the listed ranks are enumerated.
        let of_range = |range: &std::ops::Range<u32>| {
            let (from, to) = [range.start, range.end].map(|end| recorded.partition_point(|rank| *rank < end)).into();
            u64::from(range.end.saturating_sub(range.start)).saturating_sub(to.saturating_sub(from) as u64)
        };
        let missing = expected.iter().cloned().flatten().filter(|rank| recorded.binary_search(rank).is_err());
        let unrecorded_ranks: Vec<u32> = missing.take(LISTED_RANKS).collect();
        RankTable {
            world_size,
            hosts,
            imbalance: ImbalanceSummary::of(&ranks),
            unrecorded_ranks_count: expected.iter().map(of_range).fold(0, u64::saturating_add),
            unrecorded_ranks,
            ranks,
            ..RankTable::default()
        }
    }

    /// The row of a rank; the first if several hosts have it.
    pub fn rank(&self, rank: u32) -> Option<&RankSummary> {
        self.ranks.iter().find(|row| row.rank == rank)
    }
}

impl RankComparison {
    /// Makes a comparison from the median rank, A, and the worst rank, B.
    pub(crate) fn of(mut pair: DevicePair) -> RankComparison {
        pair.by_category.retain(|row| row.change.difference_bytes != 0);
        pair.by_line.retain(|row| row.change.difference_bytes != 0);
        pair.by_category.sort_by_key(|row| Reverse(row.change.difference_bytes.unsigned_abs()));
        pair.by_line.sort_by_key(|row| Reverse(row.change.difference_bytes.unsigned_abs()));
        pair.by_line.truncate(COMPARED_LINES);
        RankComparison {
            median: pair.a,
            worst: pair.b,
            difference_bytes: pair.difference_bytes,
            by_category: pair.by_category,
            by_line: pair.by_line,
        }
    }
}

impl RankSummary {
    /// The highest number of allocated bytes in a phase; `None` if the rank had no such phase.
    pub fn phase_peak(&self, phase: Phase) -> Option<u64> {
        self.phases.iter().find(|row| row.phase == phase).map(|row| row.peak_bytes)
    }
}

impl ImbalanceSummary {
    /// The imbalance of these ranks; `None` if fewer than two allocated anything.
    pub fn of(ranks: &[RankSummary]) -> Option<ImbalanceSummary> {
        let mut ranks: Vec<&RankSummary> = ranks.iter().filter(|rank| rank.peak_bytes > 0).collect();
        if ranks.len() < 2 {
            return None;
        }
        ranks.sort_by_key(|rank| (rank.peak_bytes, rank.rank, rank.pid));
        let max = ranks.last().map_or(0, |rank| rank.peak_bytes);
        let worst = ranks.iter().find(|rank| rank.peak_bytes == max)?;
        let (best, median) = (ranks.first()?, ranks.get((ranks.len() - 1) / 2)?);
        let more = |phase: Phase| {
            let (of_worst, of_median) = (worst.phase_peak(phase)?, median.phase_peak(phase)?);
            of_worst.checked_sub(of_median).filter(|more| *more > 0)
        };
        let phases = Phase::ALL.into_iter().filter_map(|phase| Some((more(phase)?, phase)));
        Some(ImbalanceSummary {
            worst_rank: worst.rank,
            median_rank: median.rank,
            best_rank: best.rank,
            max_bytes: max,
            median_bytes: median.peak_bytes,
            min_bytes: best.peak_bytes,
            difference_bytes: max - median.peak_bytes,
            unused_bytes: ranks.iter().fold(0, |sum: u64, rank| sum.saturating_add(max - rank.peak_bytes)),
            // Of phases with equal differences, the first.
            phase: phases.rev().max_by_key(|(more, _)| *more).map(|(_, phase)| phase),
        })
    }

    /// Whether the difference of worst and median is worth a comparison: at least a hundredth of the highest peak.
    pub fn matters(&self) -> bool {
        self.difference_bytes > 0 && self.difference_bytes.saturating_mul(COMPARED_SHARE) >= self.max_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u32, peak_bytes: u64) -> RankSummary {
        let phases = vec![RankPhasePeak { phase: Phase::Backward, peak_bytes }];
        RankSummary { rank, pid: 100 + rank, peak_bytes, phases, ..RankSummary::default() }
    }

    #[test]
    fn the_worst_rank_comes_first_and_the_median_is_a_rank() {
        let mut failed = rank(3, 5);
        failed.oom_count = 1;
        let launch = RankTable::of_ranks(
            vec![rank(0, 10), rank(1, 40), rank(2, 20), failed],
            Some(6),
            std::slice::from_ref(&(0..6)),
        );
        assert_eq!(launch.ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [3, 1, 2, 0]);
        assert_eq!((launch.unrecorded_ranks_count, &launch.unrecorded_ranks[..]), (2, &[4, 5][..]));
        let imbalance = launch.imbalance.unwrap();
        assert_eq!((imbalance.worst_rank, imbalance.median_rank, imbalance.best_rank), (1, 0, 3));
        assert_eq!((imbalance.difference_bytes, imbalance.unused_bytes), (30, 30 + 20 + 35));
        assert_eq!(imbalance.phase, Some(Phase::Backward));
        assert!(imbalance.matters());
    }

    #[test]
    fn a_job_may_claim_any_size() {
        let launch = RankTable::of_ranks(
            vec![rank(0, 10), rank(u32::MAX, 10)],
            Some(u32::MAX),
            std::slice::from_ref(&(0..u32::MAX)),
        );
        assert_eq!(launch.unrecorded_ranks_count, u64::from(u32::MAX) - 1);
        assert_eq!(launch.unrecorded_ranks.len(), LISTED_RANKS);
        assert!(!launch.imbalance.unwrap().matters());
        assert_eq!(RankTable::of_ranks(Vec::new(), None, &[]), RankTable::default());
    }
}
