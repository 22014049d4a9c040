//! Merges the runs of a folder into the report of one job.

use std::collections::BTreeMap;
use std::path::Path;

use memtrace_input::error::{Error, Result};
use memtrace_input::load::{JobId, JobIdSource};
use memtrace_output::{RANKS_FILE, RANKS_TABLE, RowRun, read_ranks, unpartitioned_value};
use memtrace_trace::file::untrusted;

use super::clock::{HostSteps, clocks};
use super::comparison::{Compared, compare};
use super::folders::{FoundRun, find_runs};
use super::member::{Member, MemberRow, read_summaries};
use super::notice::names;
use super::report::{HostClock, JOB_VERSION, JobReport, JobRun, RunOrigin};
use super::run_list::RunList;
use super::selection::{Job, jobs, select};
use super::table::{RankProcesses, rank_processes, rank_table};
use super::verdict::verdict;
use crate::progress::Progress;
use crate::rank_table::{ImbalanceSummary, RankTable};
use memtrace_insight::units::number_text;

/// The number of runs whose problems an error lists.
const SHOWN: usize = 3;

/// Options for merging.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct JobOptions {
    /// The id of the job, if the folder has several.
    pub job: Option<String>,
    /// Whether to compare the worst rank with the median one, which replays these two traces.
    pub compares: bool,
}

/// The contents of a folder of runs.
#[derive(Clone, PartialEq, Debug)]
pub enum JobOrRuns {
    /// The runs of one job.
    Job(Box<JobReport>),
    /// Runs of several jobs, or of none.
    Runs(RunList),
}

/// Merges the runs of one job: those in `folder` and in the folders below it, or those of the Parquet tables in it.
///
/// # Errors
///
/// If the folder has no run, or several jobs and none is chosen.
pub fn job_report(folder: &Path, options: &JobOptions, progress: &mut dyn FnMut(Progress<'_>)) -> Result<JobReport> {
    let mut notices = Vec::new();
    let members = members_of(folder, &mut notices, progress)?;
    merged(folder, &members, notices, options, progress)
}

/// Merges the runs of a job as [`job_report`] does, or lists the runs if they are of several and none is requested.
///
/// # Errors
///
/// If the folder has no run, or not the requested job.
pub fn job_or_runs(folder: &Path, options: &JobOptions, progress: &mut dyn FnMut(Progress<'_>)) -> Result<JobOrRuns> {
    let mut notices = Vec::new();
    let members = members_of(folder, &mut notices, progress)?;
    if options.job.is_none() && jobs(&members).len() > 1 {
        return Ok(JobOrRuns::Runs(RunList::new(folder.to_owned(), &members, notices)));
    }
    merged(folder, &members, notices, options, progress).map(|report| JobOrRuns::Job(Box::new(report)))
}

fn members_of(folder: &Path, notices: &mut Vec<String>, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Vec<Member>> {
    match folder.join(RANKS_TABLE) {
        tables if tables.is_dir() => members_of_tables(&tables, notices),
        _ => members_of_folders(folder, notices, progress),
    }
}

fn merged(
    folder: &Path,
    members: &[Member],
    mut notices: Vec<String>,
    options: &JobOptions,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<JobReport> {
    let job = select(folder, members, options.job.as_deref())?;
    let mut report = JobReport {
        version: JOB_VERSION.to_owned(),
        path: folder.display().to_string(),
        job: job.id.id.clone(),
        job_source: job.id.source.name().to_owned(),
        ..JobReport::default()
    };
    add_runs(&mut report, &job, &mut notices);
    let own = rank_processes(&job, &mut notices);
    report.clocks = clocks_of(&own);
    report.table = rank_table(&job, own, &mut notices);
    add_notices(&report.table, &mut notices);
    if options.compares {
        add_comparison(&mut report.table, &job, &mut notices, progress);
    }
    report.verdict = verdict(&report.table);
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
        let shown: Vec<&str> = notices.iter().take(SHOWN).map(String::as_str).collect();
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
        let source = |run: &RowRun| JobIdSource::from_name(&run.job_source).unwrap_or(JobIdSource::Run);
        let job = |run: &RowRun| JobId { source: source(run), id: run.job.clone() };
        members.push(Member {
            run: FoundRun { name, path: entry.path() },
            origin: RunOrigin::Parquet,
            host: first.process.host,
            memtrace_version: first.run.memtrace_version,
            started_ns: first.run.started_ns,
            rows: rows
                .into_iter()
                .map(|row| MemberRow {
                    job: Some(job(&row.run)).filter(|job| !job.id.is_empty()),
                    row,
                    steps: Vec::new(),
                })
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

fn clocks_of(own: &RankProcesses<'_>) -> Vec<HostClock> {
    let mut hosts: BTreeMap<String, HostSteps> = BTreeMap::new();
    for row in own.values().flat_map(|process| &process.rows) {
        hosts.entry(row.row.process.host.clone()).or_default().add(&row.steps);
    }
    let reference =
        own.values().next().and_then(|process| process.rows.first()).map(|row| row.row.process.host.clone());
    clocks(&reference.unwrap_or_default(), &hosts)
}

fn add_notices(table: &RankTable, notices: &mut Vec<String>) {
    let lost = table.ranks.iter().filter(|rank| rank.lost_events > 0).count();
    if lost > 0 {
        notices.push(format!("{} lost events: their peaks may be too low", number_text(lost as u64, "rank")));
    }
}

fn add_comparison(
    table: &mut RankTable,
    job: &Job<'_>,
    notices: &mut Vec<String>,
    progress: &mut dyn FnMut(Progress<'_>),
) {
    let Some(imbalance) = table.imbalance.filter(ImbalanceSummary::matters) else { return };
    let path = |of: u32| {
        let rank = table.rank(of)?;
        let (member, _) = job.rows.iter().find(|(member, _)| rank.run.as_deref() == Some(member.run.name.as_str()))?;
        let trace = member.run.path.join(&rank.trace);
        let is_there = member.origin != RunOrigin::Parquet && !rank.trace.contains('/');
        is_there.then_some((rank.rank, rank.device?, trace))
    };
    let (Some(median), Some(worst)) = (path(imbalance.median_rank), path(imbalance.worst_rank)) else { return };
    let [median, worst] =
        [&median, &worst].map(|(rank, device, trace)| Compared { rank: *rank, device: *device, trace });
    match compare(&median, &worst, progress) {
        Ok(comparison) => table.worst_against_median = comparison,
        Err(e) => notices.push(format!("ranks {} and {} cannot be compared: {e}", worst.rank, median.rank)),
    }
}
