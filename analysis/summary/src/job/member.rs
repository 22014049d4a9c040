//! One run of a job: the rows that it has in the table of ranks.

use std::collections::{BTreeMap, HashMap};

use memtrace_input::RunFolder;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::{JobId, JobIdSource, Manifest, Run, RunState, open_folder};
use memtrace_insight::passes::Phase;
use memtrace_output::{RankAssignment, RankRow, RowDevice, RowExit, RowPeaks, RowProcess, RowRun};
use memtrace_trace::file::untrusted;

use super::folders::FoundRun;
use super::report::RunOrigin;
use crate::build::{SummaryOptions, summarize_with};
use crate::progress::Progress;
use crate::rank_table::{RankSummary, ended_by_oom, used_bytes};
use crate::summary::{DeviceSummary, ProcessSummary, StepSummary, Summary};

/// The file that a run's own launcher wrote.
const SUMMARY_FILE: &str = "summary.json";
/// The largest summary that is read, in bytes: that of tens of thousands of processes.
const MAX_SUMMARY: u64 = 1 << 30;

/// A run of a job.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Member {
    pub(super) run: FoundRun,
    pub(super) origin: RunOrigin,
    pub(super) host: String,
    pub(super) memtrace_version: String,
    pub(super) is_running: bool,
    pub(super) started_ns: Option<u64>,
    pub(super) ended_ns: Option<u64>,
    /// The first of its worst statements. Empty for a run of Parquet tables.
    pub(super) verdict: String,
    pub(super) rows: Vec<MemberRow>,
    /// The problems of reading, as sentences without a period.
    pub(super) problems: Vec<String>,
}

/// A row, and what the table does not show of it.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct MemberRow {
    pub(super) row: RankRow,
    pub(super) job: Option<JobId>,
    pub(super) steps: Vec<StepSummary>,
}

/// Facts about a run beside its summary, from the manifest or the traces.
#[derive(Default)]
struct Facts {
    job: Option<String>,
    host: String,
    environments: HashMap<u32, BTreeMap<String, String>>,
}

impl Member {
    /// Reads a run from its `summary.json` and its manifest. `Err` has what can be said without its traces; they have
    /// to be analyzed.
    pub(super) fn of_summary(run: &FoundRun) -> std::result::Result<Member, Box<Member>> {
        let mut member = Member { run: run.clone(), origin: RunOrigin::Traces, ..Member::default() };
        let folder = match RunFolder::open(&run.path) {
            Ok(folder) => folder,
            Err(e) => {
                member.problems.push(e.to_string());
                return Err(Box::new(member));
            }
        };
        let manifest = Manifest::read(&folder).unwrap_or_else(|e| {
            member.problems.push(e.to_string());
            None
        });
        let manifest = manifest.unwrap_or_default();
        member.take_manifest(&manifest);
        let stored = match folder.open_file(SUMMARY_FILE).and_then(|file| untrusted::read(&file, MAX_SUMMARY)) {
            Ok(json) => Summary::from_json(&json).map_err(|e| e.to_string()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(Box::new(member)),
            Err(e) => Err(e.to_string()),
        };
        match stored {
            // A run that goes on can have the summary of an earlier point in time.
            Ok(stored) if !member.is_running => {
                member.origin = RunOrigin::Summary;
                member.take_summary(&stored, &Facts::of_manifest(&manifest));
                Ok(member)
            }
            Ok(_) => Err(Box::new(member)),
            Err(problem) => {
                member.problems.push(format!("cannot use {SUMMARY_FILE}: {problem}"));
                Err(Box::new(member))
            }
        }
    }

    /// Analyzes the traces of the run.
    pub(super) fn analyze(&mut self, progress: &mut dyn FnMut(Progress<'_>)) -> Result<()> {
        let cannot = || Error::io(format!("cannot open {}", self.run.path.display()));
        let folder = RunFolder::open(&self.run.path).map_err(cannot())?;
        self.take_run(&open_folder(&folder)?, progress)
    }

    fn take_run(&mut self, run: &Run, progress: &mut dyn FnMut(Progress<'_>)) -> Result<()> {
        self.problems.extend(run.problems().iter().map(|problem| {
            let name = problem.path.file_name().unwrap_or_default().to_string_lossy();
            format!("{name}: {}", problem.text)
        }));
        let summary = summarize_with(run, &SummaryOptions::default(), progress)?;
        let mut facts = Facts::of_manifest(run.manifest());
        for process in run.processes() {
            facts.environments.insert(process.pid(), process.info().env.clone());
        }
        self.origin = RunOrigin::Traces;
        self.take_summary(&summary, &facts);
        Ok(())
    }

    fn take_manifest(&mut self, manifest: &Manifest) {
        self.host = manifest.host.clone().unwrap_or_default();
        self.memtrace_version.clone_from(&manifest.memtrace);
        self.is_running = manifest.state == Some(RunState::Running);
        (self.started_ns, self.ended_ns) = (manifest.started_ns, manifest.ended_ns);
    }

    fn take_summary(&mut self, stored: &Summary, facts: &Facts) {
        if let Some(version) = &stored.run.memtrace_version {
            self.memtrace_version.clone_from(version);
        }
        self.started_ns = self.started_ns.or(stored.run.started_ns);
        let verdict = &stored.verdict;
        let worst = verdict.statements.iter().find(|statement| statement.status == verdict.status);
        self.verdict = worst.map(|statement| statement.text.clone()).unwrap_or_default();
        self.rows.clear();
        for process in &stored.processes {
            let role = RoleInRun::of(process, stored);
            let host = process.host.clone().filter(|host| !host.is_empty()).unwrap_or_else(|| facts.host.clone());
            let empty = BTreeMap::new();
            let env = facts.environments.get(&process.pid).unwrap_or(&empty);
            let job = JobId::of_process(facts.job.as_deref(), env, &host);
            let has_gpu = process.devices.iter().any(|device| device.device >= 0);
            let devices = process.devices.iter().filter(|device| device.device >= 0 || !has_gpu);
            let fatal = process.devices.iter().flat_map(|device| &device.ooms).map(|oom| oom.fatal);
            let ended_by_oom = ended_by_oom(fatal);
            // A rank that allocated nothing has a row too.
            let nothing = DeviceSummary::default();
            let without = (role.is_rank_process && process.devices.is_empty()).then_some((None, &nothing));
            for (ordinal, device) in devices.map(|device| (Some(device.device), device)).chain(without) {
                let is_rank_device = role.rank.map(|own| own.device == ordinal);
                let pci_bus_id =
                    role.rank.filter(|_| is_rank_device == Some(true)).and_then(|own| own.pci_bus_id.clone());
                let row = RankRow {
                    run: RowRun {
                        name: self.run.name.clone(),
                        job: job.as_ref().map(|job| job.id.clone()).unwrap_or_default(),
                        job_source: job.as_ref().map(|job| job.source.name().to_owned()).unwrap_or_default(),
                        started_ns: self.started_ns,
                        memtrace_version: self.memtrace_version.clone(),
                    },
                    rank: role.assignment(process),
                    process: RowProcess {
                        pid: process.pid,
                        host: host.clone(),
                        trace: process.trace.clone(),
                        steps: Some(device.steps),
                        ooms: device.oom_count,
                        ended_by_oom,
                        exit: RowExit { code: process.exit.code, signal: process.exit.signal },
                        events: process.events,
                        lost_events: process.lost_events(),
                    },
                    device: RowDevice {
                        ordinal,
                        is_rank_device,
                        pci_bus_id: pci_bus_id.unwrap_or_default(),
                        bytes: device.total_bytes,
                    },
                    peaks: row_peaks(device),
                };
                self.rows.push(MemberRow { row, job: job.clone(), steps: device.by_step.clone() });
            }
        }
    }

    /// The job of a row: its own, else that of another process of the run, else the run itself.
    pub(super) fn job_of(&self, row: &MemberRow) -> JobId {
        let any = || self.rows.iter().find_map(|row| row.job.clone());
        row.job.clone().or_else(any).unwrap_or_else(|| JobId { source: JobIdSource::Run, id: self.run.name.clone() })
    }
}

impl Facts {
    fn of_manifest(manifest: &Manifest) -> Facts {
        let environments = manifest.processes.iter().rev().map(|process| (process.pid, process.env.clone())).collect();
        Facts { job: manifest.job.clone(), host: manifest.host.clone().unwrap_or_default(), environments }
    }
}

/// The role of a process in its run.
struct RoleInRun<'a> {
    /// The rank's row in the launch, if the process is a rank.
    rank: Option<&'a RankSummary>,
    is_rank_process: bool,
    helper_of: Option<u32>,
}

impl RoleInRun<'_> {
    fn of<'a>(process: &ProcessSummary, stored: &'a Summary) -> RoleInRun<'a> {
        if let Some(launch) = &stored.launch {
            let rank = launch.table.ranks.iter().find(|rank| rank.pid == process.pid && rank.trace == process.trace);
            return RoleInRun { rank, is_rank_process: rank.is_some(), helper_of: launch.table.helper_of(process.pid) };
        }
        let is_rank_process = owns_its_rank(process, &stored.processes);
        RoleInRun { rank: None, is_rank_process, helper_of: process.rank.filter(|_| !is_rank_process) }
    }

    fn assignment(&self, process: &ProcessSummary) -> RankAssignment {
        RankAssignment {
            number: process.rank.or(self.rank.map(|own| own.rank)),
            source: self.rank.and_then(|own| own.rank_source),
            local: self.rank.and_then(|own| own.local_rank),
            node: self.rank.and_then(|own| own.node_rank),
            is_rank_process: self.is_rank_process,
            helper_of: self.helper_of,
            world_size: process.world_size,
        }
    }
}

/// Whether a process is the rank's own, in a summary without the launch. Workers inherit the rank as a variable. The
/// launcher names the snapshot of the rank's own process `rankN.pickle`; without snapshots, it is the process that
/// started the others.
fn owns_its_rank(process: &ProcessSummary, all: &[ProcessSummary]) -> bool {
    let Some(rank) = process.rank else { return false };
    let claimants = || all.iter().filter(|other| other.rank == Some(rank));
    let own = format!("rank{rank}.pickle");
    if claimants().any(|other| other.snapshot.as_deref() == Some(&own)) {
        return process.snapshot.as_deref() == Some(&own);
    }
    let is_started_by_another = process.ppid.is_some_and(|parent| claimants().any(|other| other.pid == parent));
    !is_started_by_another
}

fn row_peaks(device: &DeviceSummary) -> RowPeaks {
    let peak = device.peak.as_ref();
    RowPeaks {
        allocated: device.highest.allocated_bytes,
        reserved: device.highest.reserved_bytes,
        outside_pytorch: Some(outside_pytorch_bytes(device)),
        used: Some(most_used_bytes(device)),
        phase: Some(peak.map(|peak| peak.phase).unwrap_or_default()),
        step: peak.and_then(|peak| peak.step),
        by_phase: phase_peaks(device),
    }
}

/// The sum of the peaks of memory outside PyTorch's caching allocator.
fn outside_pytorch_bytes(device: &DeviceSummary) -> u64 {
    device.owners.iter().filter(|owner| owner.object.is_some()).map(|owner| owner.peak_bytes).sum()
}

/// The most bytes that the process took from the device.
fn most_used_bytes(device: &DeviceSummary) -> u64 {
    let owners = device.owners.iter().map(|owner| owner.peak_bytes);
    used_bytes(device.highest.allocated_bytes, device.highest.reserved_bytes, owners)
}

/// The highest number of allocated bytes in each phase of any step, in the order of [`Phase::ALL`].
fn phase_peaks(device: &DeviceSummary) -> [Option<u64>; Phase::ALL.len()] {
    let rows = || device.before_first_step.iter().chain(&device.first_step).chain(&device.later_steps);
    Phase::ALL.map(|phase| rows().filter(|row| row.phase == phase).map(|row| row.peak_bytes).max())
}

/// The rows of a run folder, for the table `ranks`: from its `summary.json`, else from its traces.
///
/// # Errors
///
/// If the run has no readable trace either.
pub fn rank_rows(run: &FoundRun, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Vec<RankRow>> {
    let member = Member::of_summary(run).or_else(|mut member| member.analyze(progress).map(|()| *member))?;
    Ok(rows(member))
}

/// The rows of an open run, from its traces. `name` is the value of the column `run`.
///
/// # Errors
///
/// The errors of the analysis.
pub fn rank_rows_of_run(name: &str, run: &Run, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Vec<RankRow>> {
    let found = FoundRun { name: name.to_owned(), path: run.path().to_owned() };
    let mut member = Member { run: found, ..Member::default() };
    member.take_manifest(run.manifest());
    member.take_run(run, progress)?;
    Ok(rows(member))
}

fn rows(member: Member) -> Vec<RankRow> {
    member.rows.into_iter().map(|member_row| member_row.row).collect()
}

/// Reads the runs on all processors. The order is that of `runs`.
pub(super) fn read_summaries(
    runs: &[FoundRun],
    progress: &mut dyn FnMut(Progress<'_>),
) -> Vec<std::result::Result<Member, Box<Member>>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).clamp(1, 16);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let (sender, receiver) = std::sync::mpsc::channel();
    let mut members: Vec<Option<std::result::Result<Member, Box<Member>>>> = vec![None; runs.len()];
    std::thread::scope(|scope| {
        for _ in 0..threads.min(runs.len()) {
            let (next, sender) = (&next, sender.clone());
            scope.spawn(move || {
                loop {
                    let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(run) = runs.get(at) else { return };
                    if sender.send((at, Member::of_summary(run))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        for (done, (at, member)) in receiver.iter().enumerate() {
            if let Some(slot) = members.get_mut(at) {
                *slot = Some(member);
            }
            progress(Progress { what: "reading the runs", done: done as u64, total: runs.len() as u64 });
        }
    });
    members.into_iter().flatten().collect()
}
