//! Builds the launch of a summary: which process is which rank, whose worker or helper the others are, and how the
//! ranks differ.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::compare::{DevicePeak, diff_peaks};
use crate::launch::{IssueProcessSummary, LaunchIssueSummary, LaunchSummary};
use crate::rank_table::{
    HelperSummary, RankComparison, RankDevice, RankPhasePeak, RankSummary, RankTable, ended_by_oom, used_bytes,
};
use crate::shared_memory::{DriverCalls, SharingProcess, shared_memory};
use crate::summary::{DeviceSummary, IssueSummary, PhaseSummary, ProcessSummary};
use memtrace_input::load::{Process, RankSource, Run};
use memtrace_insight::diagnostics::{GpuName, GpuUse, Gpus, LaunchIssue, LaunchProcess, launch_issues};
use memtrace_insight::locations::Locations;
use memtrace_insight::passes::{Analysis, DeviceUses, Phase};
use memtrace_insight::rules::library_name;
use memtrace_replay::MemoryLocation;

/// The GPUs that a process used.
#[derive(Debug)]
pub(crate) struct ProcessUses {
    uses: Vec<GpuUse>,
    /// The GPUs on which it opened memory of another process, by ordinal.
    imported: BTreeMap<i16, GpuName>,
    /// `None` if no process of the run opened memory of another one.
    driver: Option<DriverCalls>,
}

impl ProcessUses {
    /// Describes the first use of each GPU, with the most bytes that the process allocated there.
    pub(crate) fn of(
        process: &Process,
        uses: &DeviceUses,
        driver: Option<DriverCalls>,
        analysis: &Analysis,
    ) -> ProcessUses {
        let locations = Locations::new(process.definitions(), process.directory());
        let visible = process.info().env.get("CUDA_VISIBLE_DEVICES").map(|list| list.split(',').collect::<Vec<_>>());
        let name = |device: i16| {
            let ordinal = usize::from(device.unsigned_abs());
            let described = process.definitions().devices.get(&u32::from(device.unsigned_abs()));
            let visible = visible.as_ref().and_then(|list| list.get(ordinal));
            GpuName {
                pci_bus_id: described.map(|device| device.pci.to_string()).filter(|pci| !pci.is_empty()),
                index: visible.map_or_else(|| ordinal.to_string(), |one| one.trim().to_owned()),
            }
        };
        let described_uses = uses.first().into_iter().map(|(device, first)| {
            let physical = analysis.locations.get(&MemoryLocation::Device(device)).map_or(0, |usage| usage.peak);
            let of_torch = analysis
                .devices
                .iter()
                .find(|one| one.device == device)
                .map_or(0, |one| one.statistics.highest.reserved);
            // NCCL opens memory of each GPU of the host that a rank exchanges data with, without a context there.
            let is_deliberate =
                |module| library_name(process.definitions().module(module).unwrap_or_default()) != "NCCL";
            let frames = || process.definitions().walk(first.stack).filter_map(|(_, frame)| frame);
            GpuUse {
                device,
                name: name(device),
                bytes: physical.max(of_torch),
                first_used_at: locations.stack(first.stack, first.context),
                is_by_data_loader: frames().any(|frame| frame.filename.ends_with("torch/utils/data/_utils/worker.py")),
                has_imports: uses.importers(device).any(is_deliberate),
            }
        });
        ProcessUses {
            uses: described_uses.collect(),
            imported: uses.imports().map(|device| (device, name(device))).collect(),
            driver,
        }
    }

    /// The ordinal that the GPU with the ordinal `device` has in another process. `None` if that does not use it.
    pub(crate) fn shared(&self, device: i16, other: &ProcessUses) -> Option<i16> {
        let own = &self.uses.iter().find(|one| one.device == device)?.name;
        let is_same = |name: &GpuName| match (&own.pci_bus_id, &name.pci_bus_id) {
            (Some(own), Some(other)) => own == other,
            _ => own.index == name.index,
        };
        other.uses.iter().find(|one| is_same(&one.name)).map(|one| one.device)
    }

    fn pci_bus_id(&self, device: i16) -> Option<String> {
        self.uses.iter().find(|one| one.device == device)?.name.pci_bus_id.clone()
    }
}

/// The processes of one launch beside each other. `summaries`, `uses` and `peaks` are those of the run's processes, in
/// its order.
/// `None` if only one process recorded events and it is no rank of a job of several.
pub(crate) fn launch_summary(
    run: &Run,
    summaries: &[ProcessSummary],
    uses: &[ProcessUses],
    peaks: &[Vec<DevicePeak<'_>>],
) -> Option<LaunchSummary> {
    let world_size = run.processes().iter().filter_map(Process::world_size).max();
    if summaries.len() < 2 && world_size.is_none_or(|size| size < 2) {
        return None;
    }
    let roles = Roles::of(run);
    let mut ranks = Vec::new();
    let mut without_rank = Vec::new();
    for (at, (process, summary)) in run.processes().iter().zip(summaries).enumerate() {
        match roles.of_process.get(at) {
            Some(Role::Rank(rank)) => {
                let pci = |device| uses.get(at).and_then(|uses| uses.pci_bus_id(device));
                let mut row = rank_row(*rank, process, summary, &pci);
                row.helpers = roles.members(at).map(|at| helper(&summaries[at])).collect();
                row.other_attempts = roles.attempts(*rank).map(|at| summaries[at].pid).collect();
                row.helpers.sort_by_key(|helper| helper.pid);
                row.other_attempts.sort_unstable();
                ranks.push(row);
            }
            Some(Role::WithoutRank) => without_rank.push(helper(summary)),
            _ => {}
        }
    }
    without_rank.sort_by_key(|helper| helper.pid);
    let mut table = RankTable::of_ranks(ranks, world_size, &expected_ranks(run));
    let processes: Vec<LaunchProcess<'_>> = summaries
        .iter()
        .zip(uses)
        .enumerate()
        .map(|(at, (summary, uses))| {
            let rank = roles.rank_of(at);
            let row = table.ranks.iter().find(|row| Some(row.rank) == rank);
            LaunchProcess {
                pid: summary.pid,
                rank,
                is_rank: matches!(roles.of_process.get(at), Some(Role::Rank(_))),
                own_device: row.filter(|row| row.pid == summary.pid).and_then(|row| row.device),
                uses: &uses.uses,
            }
        })
        .collect();
    let issues = launch_issues(&processes).into_iter().map(launch_issue_summary).collect();
    let gpus = Gpus::of(&processes);
    let sharing = run.processes().iter().zip(&processes).zip(uses).zip(summaries);
    let sharing = sharing.map(|(((process, launched), uses), summary)| {
        let peak = |device: &DeviceSummary| Some((device.device, device.peak.as_ref()?.time_ns));
        SharingProcess {
            process,
            rank: launched.rank,
            gpus: (launched.uses.iter().map(|one| (one.device, &one.name)))
                .chain(uses.imported.iter().map(|(device, name)| (*device, name)))
                .map(|(device, name)| (device, gpus.identity(name).to_owned()))
                .collect(),
            peaks_ns: summary.devices.iter().filter_map(peak).collect(),
            driver: uses.driver.as_ref(),
        }
    });
    let shared_memory = shared_memory(&sharing.collect::<Vec<_>>());
    table.without_rank = without_rank;
    if let Some(imbalance) = table.imbalance.filter(|imbalance| imbalance.matters()) {
        let peak_of_rank = |rank: u32| {
            let row = table.rank(rank)?;
            let at = summaries.iter().position(|one| one.pid == row.pid && one.trace == row.trace)?;
            peaks.get(at)?.iter().find(|peak| Some(peak.device()) == row.device)
        };
        table.worst_against_median = peak_of_rank(imbalance.median_rank)
            .zip(peak_of_rank(imbalance.worst_rank))
            .map(|(median, worst)| RankComparison::of(diff_peaks(median, worst)));
    }
    Some(LaunchSummary { table, issues, shared_memory })
}

fn launch_issue_summary(issue: LaunchIssue) -> LaunchIssueSummary {
    let processes = issue.processes.into_iter().map(|process| IssueProcessSummary {
        pid: process.pid,
        rank: process.rank,
        device: process.device,
        bytes: process.bytes,
        location: process.location,
    });
    LaunchIssueSummary {
        issue: IssueSummary {
            rule: issue.rule.id,
            device: issue.device,
            bytes: issue.bytes,
            headline: issue.headline,
            evidence: issue.evidence,
            stack: issue.stack,
            fix: issue.fix,
            saves_bytes: None,
            forecast: None,
            files: Vec::new(),
            held_by: Vec::new(),
            help: None,
        },
        processes: processes.collect(),
    }
}

/// The role of a process in the launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    /// It is this rank.
    Rank(u32),
    /// It had this rank before or after the process that stands for it.
    OtherAttempt(u32),
    /// It is a worker or helper of the process at this place.
    Helper(usize),
    /// It belongs to no rank.
    WithoutRank,
}

/// The roles of the processes of a run, in its order.
struct Roles {
    of_process: Vec<Role>,
    helpers: BTreeMap<usize, Vec<usize>>,
    attempts: BTreeMap<u32, Vec<usize>>,
}

impl Roles {
    fn of(run: &Run) -> Roles {
        let processes = run.processes();
        let names = run.process_names();
        let by_pid: BTreeMap<u32, usize> = processes.iter().enumerate().map(|(at, one)| (one.pid(), at)).collect();
        let mut by_rank: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (at, process) in processes.iter().enumerate() {
            if let Some(rank) = process.rank() {
                by_rank.entry(rank).or_default().push(at);
            }
        }
        let mut of_process = vec![Role::WithoutRank; processes.len()];
        for (rank, all) in &by_rank {
            let pids: BTreeSet<u32> = all.iter().map(|at| processes[*at].pid()).collect();
            let is_started_by_other =
                |at: usize| processes[at].info().ppid.is_some_and(|parent| pids.contains(&parent));
            let named = all.iter().copied().find(|at| names[*at] == format!("rank{rank}"));
            let reported = |at: &usize| processes[*at].definitions().rank.is_some();
            // After a restart, several processes own the rank: the one that recorded most stands for it.
            let starters = all.iter().copied().filter(|at| !is_started_by_other(*at));
            let most = starters.max_by_key(|at| {
                (reported(at), processes[*at].recording().event_count(), Reverse(processes[*at].pid()))
            });
            let Some(main) = named.or(most) else { continue };
            for &at in all {
                of_process[at] = match at {
                    _ if at == main => Role::Rank(*rank),
                    _ if named.is_none() && !is_started_by_other(at) => Role::OtherAttempt(*rank),
                    _ => Role::Helper(main),
                };
            }
        }
        for (at, process) in processes.iter().enumerate() {
            if process.rank().is_some() {
                continue;
            }
            // A child of a rank that does not inherit its variables.
            let mut parent = process.info().ppid;
            for _ in 0..processes.len() {
                let Some(above) = parent.and_then(|pid| by_pid.get(&pid)).copied() else { break };
                match of_process[above] {
                    Role::Rank(_) => of_process[at] = Role::Helper(above),
                    Role::Helper(main) => of_process[at] = Role::Helper(main),
                    Role::OtherAttempt(_) | Role::WithoutRank => {
                        parent = processes[above].info().ppid;
                        continue;
                    }
                }
                break;
            }
        }
        let (mut helpers, mut attempts): (BTreeMap<_, Vec<_>>, BTreeMap<_, Vec<_>>) = Default::default();
        for (at, role) in of_process.iter().enumerate() {
            match role {
                Role::Helper(main) => helpers.entry(*main).or_default().push(at),
                Role::OtherAttempt(rank) => attempts.entry(*rank).or_default().push(at),
                _ => {}
            }
        }
        Roles { of_process, helpers, attempts }
    }

    fn members(&self, main: usize) -> impl Iterator<Item = usize> + '_ {
        self.helpers.get(&main).into_iter().flatten().copied()
    }

    fn attempts(&self, rank: u32) -> impl Iterator<Item = usize> + '_ {
        self.attempts.get(&rank).into_iter().flatten().copied()
    }

    /// The rank to which a process belongs.
    fn rank_of(&self, at: usize) -> Option<u32> {
        match self.of_process.get(at)? {
            Role::Rank(rank) | Role::OtherAttempt(rank) => Some(*rank),
            Role::Helper(main) => match self.of_process.get(*main)? {
                Role::Rank(rank) => Some(*rank),
                _ => None,
            },
            Role::WithoutRank => None,
        }
    }
}

/// The ranks that should have recorded something on this host. A launcher that reports the number of ranks on the host
/// numbers them without gaps. Without this number, only gaps between recorded ranks are known.
fn expected_ranks(run: &Run) -> Vec<Range<u32>> {
    let mut of_hosts: BTreeSet<(u32, u32)> = BTreeSet::new();
    let mut recorded: BTreeSet<u32> = BTreeSet::new();
    for process in run.processes() {
        let Some((rank, source)) = process.rank_and_source() else { continue };
        // The user chose the files: others may be left out.
        if matches!(source, RankSource::FileName | RankSource::FileOrder) {
            continue;
        }
        recorded.insert(rank);
        let first = process.local_rank().and_then(|local| rank.checked_sub(local));
        let end = first.zip(process.local_world_size()).and_then(|(first, count)| first.checked_add(count));
        let end = end.filter(|end| process.world_size().is_none_or(|size| *end <= size));
        of_hosts.extend(first.zip(end));
    }
    // A launcher can start one memtrace for each rank. The other ranks then have runs of their own.
    if recorded.len() < 2 {
        return Vec::new();
    }
    let covers =
        |range: &(u32, u32)| recorded.range(..range.0).next().is_none() && recorded.range(range.1..).next().is_none();
    match of_hosts.iter().next() {
        Some(only) if of_hosts.len() == 1 && covers(only) => std::iter::once(only.0..only.1).collect(),
        _ => recorded
            .first()
            .zip(recorded.last())
            .map(|(first, last)| *first..last.saturating_add(1))
            .into_iter()
            .collect(),
    }
}

fn helper(summary: &ProcessSummary) -> HelperSummary {
    let of_gpus = summary.devices.iter().filter(|device| device.device >= 0);
    let peak = |device: &DeviceSummary| {
        let owners = device.owners.iter().map(|owner| owner.peak_bytes);
        used_bytes(device.highest.allocated_bytes, device.highest.reserved_bytes, owners)
    };
    HelperSummary { pid: summary.pid, peak_bytes: of_gpus.map(peak).sum(), ..HelperSummary::default() }
}

fn all_phases(device: &DeviceSummary) -> impl Iterator<Item = &PhaseSummary> {
    device.before_first_step.iter().chain(&device.first_step).chain(&device.later_steps)
}

/// The rank's own device.
fn own_device(summary: &ProcessSummary, local_rank: Option<u32>) -> Option<&DeviceSummary> {
    let computed = |device: &DeviceSummary| -> u64 {
        let passes = all_phases(device).filter(|row| matches!(row.phase, Phase::Forward | Phase::Backward));
        passes.map(|row| row.allocations).sum()
    };
    let is_local = |device: &DeviceSummary| u32::try_from(device.device).ok() == local_rank && local_rank.is_some();
    let gpus = summary.devices.iter().filter(|device| device.device >= 0);
    let own = gpus.max_by_key(|device| {
        (is_local(device), computed(device), device.highest.allocated_bytes, Reverse(device.device))
    });
    own.or(summary.devices.first())
}

fn rank_row(
    rank: u32,
    process: &Process,
    summary: &ProcessSummary,
    pci_bus_id: &dyn Fn(i16) -> Option<String>,
) -> RankSummary {
    let local_rank = process.local_rank();
    let own = own_device(summary, local_rank);
    let mut row = RankSummary {
        rank,
        rank_source: process.rank_and_source().map(|(_, source)| source),
        local_rank,
        node_rank: process.node_rank(),
        host: summary.host.clone(),
        pid: summary.pid,
        trace: summary.trace.clone(),
        oom_count: summary.devices.iter().map(|device| device.oom_count).sum(),
        exit: summary.exit,
        events: summary.events,
        lost_events: summary.lost_events(),
        outside_pytorch_bytes: Some(0),
        peak_phase: Some(Phase::default()),
        steps: Some(0),
        ..RankSummary::default()
    };
    row.ended_by_oom = ended_by_oom(summary.devices.iter().flat_map(|device| &device.ooms).map(|oom| oom.fatal));
    let Some(device) = own else { return row };
    let owner = |owner: &crate::summary::OwnerSummary| owner.object.as_ref().map_or(0, |_| owner.peak_bytes);
    let mut phases: BTreeMap<Phase, u64> = BTreeMap::new();
    // A server has stages, not phases of a training.
    for phase in all_phases(device).filter(|_| device.server_only().is_none()) {
        let peak = phases.entry(phase.phase).or_default();
        *peak = phase.peak_bytes.max(*peak);
    }
    row.device = Some(device.device);
    row.pci_bus_id = pci_bus_id(device.device);
    row.total_bytes = device.total_bytes;
    row.peak_bytes = device.highest.allocated_bytes;
    row.reserved_bytes = device.highest.reserved_bytes;
    row.outside_pytorch_bytes = Some(device.owners.iter().map(owner).sum());
    row.phases = Phase::ALL
        .into_iter()
        .filter_map(|phase| Some(RankPhasePeak { phase, peak_bytes: *phases.get(&phase)? }))
        .collect();
    row.peak_phase = Some(device.peak.as_ref().map(|peak| peak.phase).unwrap_or_default());
    row.peak_step = device.peak.as_ref().and_then(|peak| peak.step);
    row.steps = Some(device.steps);
    let others = summary.devices.iter().filter(|other| other.device != device.device);
    row.other_devices = others
        .map(|other| RankDevice {
            device: other.device,
            peak_bytes: other.highest.allocated_bytes,
            reserved_bytes: other.highest.reserved_bytes,
        })
        .collect();
    row.other_devices.sort_by_key(|other| other.device);
    row
}
