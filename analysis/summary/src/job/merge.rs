//! Merges the runs of a folder into the report of one job.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use memtrace_input::error::{Error, Result};
use memtrace_input::load::{Exit, JobId, JobIdSource};
use memtrace_insight::passes::Phase;
use memtrace_output::{RANKS_FILE, RANKS_TABLE, RankRow, read_ranks, unpartitioned_value};
use memtrace_trace::file::untrusted;

use super::clock::{HostSteps, clocks};
use super::comparison::{Compared, compare};
use super::folders::{FoundRun, find_runs};
use super::member::{Member, MemberRow, read_summaries};
use super::report::{
    JOB_VERSION, JobDevice, JobImbalance, JobPhasePeak, JobProcess, JobRank, JobReport, JobRun, RunOrigin,
};
use super::selection::{Job, select};
use crate::progress::Progress;
use crate::units::{count_text, number_text};

/// The number of missing ranks that are listed.
const LISTED: usize = 64;
/// The number of names in a notice.
const NAMES: usize = 3;

/// What to merge.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct JobOptions {
    /// The id of the job, if the folder has several.
    pub job: Option<String>,
    /// Whether to compare the worst rank with the median one, which replays these two traces.
    pub compares: bool,
}

/// Merges the runs of one job: those in `folder` and in the folders below it, or those of the Parquet tables in it.
///
/// # Errors
///
/// If the folder has no run, or several jobs and none is chosen.
pub fn job_report(folder: &Path, options: &JobOptions, progress: &mut dyn FnMut(Progress<'_>)) -> Result<JobReport> {
    let mut notices = Vec::new();
    let members = if folder.join(RANKS_TABLE).is_dir() {
        members_of_tables(&folder.join(RANKS_TABLE), &mut notices)?
    } else {
        members_of_folders(folder, &mut notices, progress)?
    };
    let job = select(folder, &members, options.job.as_deref())?;
    let mut report = JobReport {
        version: JOB_VERSION.to_owned(),
        path: folder.display().to_string(),
        job: job.id.id.clone(),
        job_source: job.id.source.text().to_owned(),
        ..JobReport::default()
    };
    add_runs(&mut report, &job, &mut notices);
    let own = rank_processes(&job, &mut notices);
    report.ranks = own.iter().filter_map(|(rank, rows)| job_rank(*rank, rows)).collect();
    report.ranks.sort_by_key(|rank| (Reverse((rank.oom_count > 0, rank.peak_bytes)), rank.rank));
    add_other_processes(&mut report, &job, &own);
    add_missing_ranks(&mut report, &job, &mut notices);
    report.imbalance = imbalance(&report.ranks);
    add_clocks(&mut report, &own);
    add_notices(&report, &mut notices);
    if options.compares {
        add_comparison(&mut report, &job, &mut notices, progress);
    }
    report.notices = notices;
    Ok(report)
}

fn members_of_folders(
    folder: &Path,
    notices: &mut Vec<String>,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Vec<Member>> {
    let runs = find_runs(folder)?;
    if runs.is_empty() {
        return Err(Error::Job {
            reason: format!("cannot read {}: it contains no run folder", folder.display()),
            help: "pass the folder of --runs, or one into which run folders were gathered".to_owned(),
        });
    }
    let mut members = Vec::new();
    for member in read_summaries(&runs, progress) {
        let member = member.or_else(|mut member| match member.analyze(progress) {
            Ok(()) => Ok(*member),
            Err(e) => Err((member.run.name.clone(), e)),
        });
        match member {
            Ok(member) => members.push(member),
            // Programs that record nothing, such as a launcher on a host without ranks, lack nothing.
            Err((name, Error::NothingRecorded { .. })) => notices.push(format!("{name} recorded no memory")),
            Err((name, e)) => notices.push(format!("{name} is left out: {}", e.reason())),
        }
    }
    for member in &members {
        notices.extend(member.problems.iter().map(|problem| format!("{}: {problem}", member.run.name)));
    }
    if members.is_empty() {
        let shown: Vec<&str> = notices.iter().take(NAMES).map(String::as_str).collect();
        return Err(Error::Job {
            reason: format!(
                "cannot read any of the {} in {}: {}",
                number_text(runs.len() as u64, "run"),
                folder.display(),
                shown.join("; ")
            ),
            help: "memtrace report RUN explains one of them".to_owned(),
        });
    }
    Ok(members)
}

fn members_of_tables(folder: &Path, notices: &mut Vec<String>) -> Result<Vec<Member>> {
    let cannot = || Error::io(format!("cannot list {}", folder.display()));
    let mut members = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(cannot())?.flatten() {
        let Some(name) = unpartitioned_value(&entry.file_name().to_string_lossy(), "run") else { continue };
        let path = entry.path().join(RANKS_FILE);
        let file = untrusted::open(&path).map_err(Error::io(format!("cannot open {}", path.display())));
        let rows = match file.and_then(|file| read_ranks(&path, file, &name)) {
            Ok(rows) => rows,
            Err(e) => {
                notices.push(format!("{name} is left out: {}", e.reason()));
                continue;
            }
        };
        let first = rows.first().cloned().unwrap_or_default();
        let source = |row: &RankRow| JobIdSource::named(&row.job_source).unwrap_or(JobIdSource::Run);
        let job = |row: &RankRow| JobId { source: source(row), id: row.job.clone() };
        members.push(Member {
            run: FoundRun { name, path: entry.path() },
            origin: RunOrigin::Parquet,
            host: first.host,
            memtrace_version: first.memtrace_version,
            started_ns: first.started_ns,
            rows: rows
                .into_iter()
                .map(|row| MemberRow { job: Some(job(&row)).filter(|job| !job.id.is_empty()), row, steps: Vec::new() })
                .collect(),
            ..Member::default()
        });
    }
    members.sort_by(|a, b| a.run.cmp(&b.run));
    if members.is_empty() {
        return Err(Error::Job {
            reason: format!("cannot read {}: it contains no readable run=NAME/{RANKS_FILE}", folder.display()),
            help: "write it again: memtrace export DIR --to parquet --partition -o TABLES".to_owned(),
        });
    }
    Ok(members)
}

fn add_runs(report: &mut JobReport, job: &Job<'_>, notices: &mut Vec<String>) {
    let mut runs: BTreeMap<&FoundRun, &Member> = BTreeMap::new();
    for (member, _) in &job.rows {
        runs.insert(&member.run, member);
    }
    let run = |member: &&Member| JobRun {
        name: member.run.name.clone(),
        path: (member.origin != RunOrigin::Parquet).then(|| member.run.path.display().to_string()),
        origin: member.origin,
        host: member.host.clone(),
        memtrace_version: member.memtrace_version.clone(),
        is_running: member.is_running,
        started_ns: member.started_ns,
        ended_ns: member.ended_ns,
    };
    report.runs = runs.values().map(run).collect();
    let analyzed: Vec<&str> =
        report.runs.iter().filter(|run| run.origin == RunOrigin::Traces).map(|run| run.name.as_str()).collect();
    if !analyzed.is_empty() {
        notices.push(format!(
            "{} without a summary.json: read from their traces ({})",
            number_text(analyzed.len() as u64, "run"),
            names(&analyzed)
        ));
    }
    let running: Vec<&str> = report.runs.iter().filter(|run| run.is_running).map(|run| run.name.as_str()).collect();
    if !running.is_empty() {
        let what = number_text(running.len() as u64, "run");
        notices
            .push(format!("{what} without an end: memtrace was killed, or is still recording ({})", names(&running)));
    }
    let mut versions: BTreeMap<&str, u64> = BTreeMap::new();
    for run in report.runs.iter().filter(|run| !run.memtrace_version.is_empty()) {
        *versions.entry(&run.memtrace_version).or_default() += 1;
    }
    if versions.len() > 1 {
        let each = versions.iter().map(|(version, runs)| format!("{version} ({})", number_text(*runs, "run")));
        notices.push(format!(
            "the runs were recorded by different versions of memtrace: {}",
            each.collect::<Vec<_>>().join(", ")
        ));
    }
}

/// The first names, and how many there are besides.
fn names(all: &[&str]) -> String {
    let more = all.len().saturating_sub(NAMES);
    let more = if more > 0 { format!(" and {} more", count_text(more as u64)) } else { String::new() };
    format!("{}{more}", all.iter().take(NAMES).copied().collect::<Vec<_>>().join(", "))
}

type RowsOfRank<'a> = BTreeMap<u32, Vec<&'a MemberRow>>;
/// A process: the start of its run in nanoseconds since the Unix epoch, the run's name, and its pid.
type ProcessKey<'a> = (Option<u64>, &'a str, u32);

/// The rows of each rank's own process. Of several processes with a rank, the one of the run that started last counts.
fn rank_processes<'a>(job: &Job<'a>, notices: &mut Vec<String>) -> RowsOfRank<'a> {
    let mut claims: BTreeMap<u32, BTreeMap<ProcessKey<'_>, Vec<&MemberRow>>> = BTreeMap::new();
    for (member, row) in &job.rows {
        if let Some(rank) = row.row.rank.filter(|_| row.row.is_rank_process) {
            let process = (member.started_ns, member.run.name.as_str(), row.row.pid);
            claims.entry(rank).or_default().entry(process).or_default().push(row);
        }
    }
    let (mut ranks, mut twice) = (RowsOfRank::new(), Vec::new());
    for (rank, mut processes) in claims {
        let others = processes.len().saturating_sub(1);
        let Some(((_, run, _), rows)) = processes.pop_last() else { continue };
        if others > 0 {
            twice.push(format!("{rank} ({run})"));
        }
        ranks.insert(rank, rows);
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

fn job_rank(rank: u32, rows: &[&MemberRow]) -> Option<JobRank> {
    let own = rows.iter().max_by_key(|row| (row.row.ooms > 0, row.row.peak_allocated, Reverse(row.row.device)))?;
    let others = rows.iter().filter(|row| row.row.device != own.row.device).map(|row| &row.row);
    let row = &own.row;
    let phases = Phase::ALL.into_iter().zip(row.phase_peaks);
    Some(JobRank {
        rank,
        run: row.run.clone(),
        host: row.host.clone(),
        pid: row.pid,
        trace: row.trace.clone(),
        device: row.device,
        total_bytes: row.device_bytes,
        peak_bytes: row.peak_allocated,
        reserved_bytes: row.peak_reserved,
        phases: phases.filter_map(|(phase, peak)| peak.map(|peak_bytes| JobPhasePeak { phase, peak_bytes })).collect(),
        oom_count: row.ooms,
        other_devices: others
            .map(|row| JobDevice {
                device: row.device,
                peak_bytes: row.peak_allocated,
                reserved_bytes: row.peak_reserved,
            })
            .collect(),
        exit: Exit { code: row.exit.code, signal: row.exit.signal },
        events: row.events,
        lost_events: row.lost_events,
    })
}

fn add_other_processes(report: &mut JobReport, job: &Job<'_>, own: &RowsOfRank<'_>) {
    let is_own = |row: &MemberRow| {
        let rows = row.row.rank.and_then(|rank| own.get(&rank));
        rows.is_some_and(|rows| rows.iter().any(|own| std::ptr::eq(*own, row)))
    };
    let has_memory = |row: &RankRow| row.device >= 0 && row.peak_reserved.max(row.peak_allocated) > 0;
    let others = job.rows.iter().map(|(_, row)| *row).filter(|row| has_memory(&row.row) && !is_own(row));
    report.other_processes = others
        .map(|row| JobProcess {
            run: row.row.run.clone(),
            host: row.row.host.clone(),
            pid: row.row.pid,
            rank: row.row.rank,
            device: row.row.device,
            peak_bytes: row.row.peak_allocated,
        })
        .collect();
    report.other_processes.sort_by_key(|process| (Reverse(process.peak_bytes), process.run.clone(), process.pid));
}

fn add_missing_ranks(report: &mut JobReport, job: &Job<'_>, notices: &mut Vec<String>) {
    let sizes: BTreeSet<u32> = job.rows.iter().filter_map(|(_, row)| row.row.world_size).collect();
    report.world_size = sizes.last().copied();
    if sizes.len() > 1 {
        let sizes: Vec<String> = sizes.iter().map(u32::to_string).collect();
        notices.push(format!("the ranks report different world sizes: {}", sizes.join(", ")));
    }
    let present: BTreeSet<u32> = report.ranks.iter().map(|rank| rank.rank).collect();
    let size = report.world_size.unwrap_or(0);
    report.missing_ranks_count = u64::from(size).saturating_sub(present.range(..size).count() as u64);
    report.missing_ranks = (0..size).filter(|rank| !present.contains(rank)).take(LISTED).collect();
}

fn imbalance(ranks: &[JobRank]) -> Option<JobImbalance> {
    let mut by_peak: Vec<(u64, Reverse<u32>)> =
        ranks.iter().map(|rank| (rank.peak_bytes, Reverse(rank.rank))).collect();
    by_peak.sort_unstable();
    let (best, worst) = (*by_peak.first()?, *by_peak.last().filter(|_| by_peak.len() > 1)?);
    let median = *by_peak.get((by_peak.len() - 1) / 2)?;
    // Of equal ranks, the first.
    let first = |bytes: u64| by_peak.iter().filter(|(peak, _)| *peak == bytes).map(|(_, rank)| rank.0).min();
    Some(JobImbalance {
        worst_rank: first(worst.0)?,
        median_rank: first(median.0)?,
        best_rank: first(best.0)?,
        max_bytes: worst.0,
        median_bytes: median.0,
        min_bytes: best.0,
    })
}

fn add_clocks(report: &mut JobReport, own: &RowsOfRank<'_>) {
    let mut hosts: BTreeMap<String, HostSteps> = BTreeMap::new();
    for rows in own.values() {
        for row in rows {
            hosts.entry(row.row.host.clone()).or_default().add(&row.steps);
        }
    }
    let reference = own.values().next().and_then(|rows| rows.first()).map(|row| row.row.host.clone());
    report.clocks = clocks(&reference.unwrap_or_default(), &hosts);
}

fn add_notices(report: &JobReport, notices: &mut Vec<String>) {
    let lost = report.ranks.iter().filter(|rank| rank.lost_events > 0).count();
    if lost > 0 {
        notices.push(format!("{} lost events: their peaks may be too low", number_text(lost as u64, "rank")));
    }
    let failed: Vec<String> = report
        .ranks
        .iter()
        .filter_map(|rank| match (rank.exit.signal, rank.exit.code) {
            (Some(signal), _) => Some(format!("{} (signal {signal})", rank.rank)),
            (None, Some(code)) if code != 0 => Some(format!("{} (exit status {code})", rank.rank)),
            _ => None,
        })
        .collect();
    if !failed.is_empty() {
        let shown: Vec<&str> = failed.iter().map(String::as_str).collect();
        notices.push(format!("{} failed: {}", number_text(failed.len() as u64, "rank"), names(&shown)));
    }
}

fn add_comparison(
    report: &mut JobReport,
    job: &Job<'_>,
    notices: &mut Vec<String>,
    progress: &mut dyn FnMut(Progress<'_>),
) {
    let Some(imbalance) = report.imbalance else { return };
    if imbalance.max_bytes - imbalance.median_bytes < imbalance.max_bytes / 100 {
        return;
    }
    let path = |of: u32| {
        let rank = report.ranks.iter().find(|rank| rank.rank == of)?;
        let (member, _) = job.rows.iter().find(|(member, _)| member.run.name == rank.run)?;
        let trace = member.run.path.join(&rank.trace);
        (member.origin != RunOrigin::Parquet && !rank.trace.contains('/')).then_some((rank, trace))
    };
    let (Some((worst, a)), Some((median, b))) = (path(imbalance.worst_rank), path(imbalance.median_rank)) else {
        return;
    };
    let worst = Compared { rank: worst.rank, trace: &a, device: worst.device };
    let median = Compared { rank: median.rank, trace: &b, device: median.device };
    match compare(&worst, &median, progress) {
        Ok(comparison) => report.worst_against_median = comparison,
        Err(e) => notices.push(format!("ranks {} and {} cannot be compared: {e}", worst.rank, median.rank)),
    }
}
