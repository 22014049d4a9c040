//! Makes the table of ranks of a job from the rows of its runs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use memtrace_input::load::Exit;
use memtrace_insight::passes::Phase;
use memtrace_output::{RankRow, RowProcess};

use super::member::MemberRow;
use super::notice::names;
use super::selection::Job;
use crate::rank_table::{HelperSummary, RankDevice, RankPhasePeak, RankSummary, RankTable};
use memtrace_insight::units::number_text;

/// The own process of a rank.
#[derive(Default)]
pub(super) struct RankProcess<'a> {
    run: &'a str,
    /// Its rows: one for each device.
    pub(super) rows: Vec<&'a MemberRow>,
    other_attempts: BTreeSet<u32>,
    other_runs: BTreeSet<&'a str>,
    helpers: Vec<HelperSummary>,
}

/// The own processes, by rank.
pub(super) type RankProcesses<'a> = BTreeMap<u32, RankProcess<'a>>;

/// A process: the start of its run in nanoseconds since the Unix epoch, the run's name, and its pid.
type ProcessKey<'a> = (Option<u64>, &'a str, u32);

/// The own process of each rank. Of several processes with a rank, the one of the run that started last counts.
pub(super) fn rank_processes<'a>(job: &Job<'a>, notices: &mut Vec<String>) -> RankProcesses<'a> {
    let mut claims: BTreeMap<u32, BTreeMap<ProcessKey<'a>, Vec<&'a MemberRow>>> = BTreeMap::new();
    for (member, row) in &job.rows {
        if let Some(rank) = row.row.rank.number.filter(|_| row.row.rank.is_rank_process) {
            let process = (member.started_ns, member.run.name.as_str(), row.row.process.pid);
            claims.entry(rank).or_default().entry(process).or_default().push(row);
        }
    }
    let (mut ranks, mut twice) = (RankProcesses::new(), Vec::new());
    for (rank, mut processes) in claims {
        let Some(((_, run, _), rows)) = processes.pop_last() else { continue };
        if !processes.is_empty() {
            twice.push(format!("{rank} ({run})"));
        }
        let others = |is_same: bool| processes.keys().filter(move |(_, other, _)| (*other == run) == is_same);
        let other_attempts = others(true).map(|(.., pid)| *pid).collect();
        let other_runs = others(false).map(|(_, other, _)| *other).collect();
        ranks.insert(rank, RankProcess { run, rows, other_attempts, other_runs, helpers: Vec::new() });
    }
    if !twice.is_empty() {
        let shown: Vec<&str> = twice.iter().map(String::as_str).collect();
        let what = number_text(twice.len() as u64, "rank");
        notices.push(format!(
            "{what} with several processes: the table has the one that started last, of rank {}",
            names(&shown)
        ));
    }
    ranks
}

/// The table of these ranks, and of the other processes of the job.
pub(super) fn rank_table(job: &Job<'_>, mut own: RankProcesses<'_>, notices: &mut Vec<String>) -> RankTable {
    let sizes: BTreeSet<u32> = job.rows.iter().filter_map(|(_, row)| row.row.rank.world_size).collect();
    if sizes.len() > 1 {
        let sizes: Vec<String> = sizes.iter().map(u32::to_string).collect();
        notices.push(format!("the ranks report different world sizes: {}", sizes.join(", ")));
    }
    let without_rank = add_other_processes(job, &mut own);
    let world_size = sizes.last().copied();
    let ranks = own.iter().filter_map(|(rank, process)| rank_summary(*rank, process)).collect();
    let mut table = RankTable::of_ranks(ranks, world_size, world_size.map(|size| 0..size).as_slice());
    table.without_rank = without_rank;
    table
}

/// Adds the workers, helpers and other attempts of the ranks. Returns the processes that belong to none.
fn add_other_processes(job: &Job<'_>, own: &mut RankProcesses<'_>) -> Vec<HelperSummary> {
    let mut processes: BTreeMap<(&str, u32), Vec<&RankRow>> = BTreeMap::new();
    for (_, row) in job.rows.iter().filter(|(_, row)| !row.row.rank.is_rank_process) {
        processes.entry((row.row.run.name.as_str(), row.row.process.pid)).or_default().push(&row.row);
    }
    let mut without_rank = Vec::new();
    for ((run, pid), rows) in processes {
        let Some(first) = rows.first() else { continue };
        let on_gpus = rows.iter().filter(|row| row.device.ordinal.is_some_and(|device| device >= 0));
        let peak = |row: &&RankRow| row.peaks.used.unwrap_or(0).max(row.peaks.reserved).max(row.peaks.allocated);
        let helper = HelperSummary {
            pid,
            run: Some(run.to_owned()),
            host: host(&first.process),
            peak_bytes: on_gpus.map(peak).fold(0, u64::saturating_add),
        };
        match first.rank.helper_of.or(first.rank.number).and_then(|rank| own.get_mut(&rank)) {
            Some(process) if process.run == run => match first.rank.helper_of {
                Some(_) => process.helpers.push(helper),
                None => _ = process.other_attempts.insert(pid),
            },
            // Its run does not count, and the rank names this run.
            Some(process) if process.other_runs.contains(run) => {}
            _ => without_rank.push(helper),
        }
    }
    without_rank
}

fn host(process: &RowProcess) -> Option<String> {
    Some(process.host.clone()).filter(|host| !host.is_empty())
}

fn rank_summary(rank: u32, process: &RankProcess<'_>) -> Option<RankSummary> {
    let rows = || process.rows.iter().map(|row| &row.row);
    // Without a note of the own device, the one with an error, else the one with the highest peak.
    let own = rows().max_by_key(|RankRow { process, device, peaks, .. }| {
        (device.is_rank_device == Some(true), process.ooms > 0, peaks.allocated, Reverse(device.ordinal))
    })?;
    let other = |row: &RankRow| {
        let (peak_bytes, reserved_bytes) = (row.peaks.allocated, row.peaks.reserved);
        row.device.ordinal.map(|device| RankDevice { device, peak_bytes, reserved_bytes })
    };
    let mut other_devices: Vec<RankDevice> =
        rows().filter(|row| row.device.ordinal != own.device.ordinal).filter_map(other).collect();
    other_devices.sort_by_key(|other| other.device);
    let RankRow { process: recorded, peaks, .. } = own;
    let phases = Phase::ALL.into_iter().zip(peaks.by_phase);
    Some(RankSummary {
        rank,
        rank_source: own.rank.source,
        local_rank: own.rank.local,
        node_rank: own.rank.node,
        host: host(recorded),
        run: Some(own.run.name.clone()),
        pid: recorded.pid,
        trace: recorded.trace.clone(),
        device: own.device.ordinal,
        pci_bus_id: Some(own.device.pci_bus_id.clone()).filter(|id| !id.is_empty()),
        total_bytes: own.device.bytes,
        peak_bytes: peaks.allocated,
        reserved_bytes: peaks.reserved,
        outside_pytorch_bytes: peaks.outside_pytorch,
        phases: phases.filter_map(|(phase, peak)| peak.map(|peak_bytes| RankPhasePeak { phase, peak_bytes })).collect(),
        peak_phase: peaks.phase,
        peak_step: peaks.step,
        steps: recorded.steps,
        oom_count: rows().map(|row| row.process.ooms).fold(0, u64::saturating_add),
        ended_by_oom: recorded.ended_by_oom,
        exit: Exit { code: recorded.exit.code, signal: recorded.exit.signal },
        events: recorded.events,
        lost_events: recorded.lost_events,
        other_devices,
        helpers: process.helpers.clone(),
        other_attempts: process.other_attempts.iter().copied().collect(),
        other_runs: process.other_runs.iter().map(|run| (*run).to_owned()).collect(),
    })
}
