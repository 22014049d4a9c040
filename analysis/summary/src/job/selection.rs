//! Divides the runs of a folder into jobs, and selects one.

use std::collections::BTreeMap;
use std::path::Path;

use memtrace_input::error::{Error, Result};
use memtrace_input::load::{JobId, JobIdSource};

use super::member::{Member, MemberRow};

/// The number of jobs that an error lists.
const LISTED: usize = 12;

/// The rows of one job, each with its run.
pub(super) struct Job<'a> {
    pub(super) id: JobId,
    pub(super) rows: Vec<(&'a Member, &'a MemberRow)>,
}

/// The jobs that runs are a part of.
pub(super) fn jobs(members: &[Member]) -> Vec<Job<'_>> {
    let mut jobs: BTreeMap<JobId, Vec<(&Member, &MemberRow)>> = BTreeMap::new();
    for member in members {
        for row in &member.rows {
            jobs.entry(member.job_of(row)).or_default().push((member, row));
        }
    }
    jobs.into_iter().flat_map(|(id, rows)| at_one_time(Job { id, rows })).collect()
}

/// The job that the user requests, or the only one.
///
/// # Errors
///
/// If the folder has several jobs and none is requested, or not the requested one.
pub(super) fn select<'a>(folder: &Path, members: &'a [Member], requested: Option<&str>) -> Result<Job<'a>> {
    let mut jobs = jobs(members);
    let mut found: Vec<usize> = (0..jobs.len()).collect();
    if let Some(requested) = requested {
        found.retain(|at| jobs[*at].id.id == requested);
    }
    match (&found[..], requested) {
        ([only], _) => Ok(jobs.swap_remove(*only)),
        ([], None) => Err(Error::Job {
            reason: format!("cannot read {}: its runs recorded no memory", folder.display()),
            help: "record a program that allocates GPU memory".to_owned(),
        }),
        ([], Some(requested)) => Err(Error::Job {
            reason: format!("{} has no job {requested}", folder.display()),
            help: format!("its jobs are {}", list(&jobs)),
        }),
        _ => Err(Error::Job {
            reason: format!("{} has {} jobs", folder.display(), found.len()),
            help: format!("choose one with --job: {}", list(&jobs)),
        }),
    }
}

/// Divides a job that has only the address of its rendezvous. Jobs that follow each other can have the same address,
/// but the runs of one job overlap in time.
fn at_one_time<'a>(job: Job<'a>) -> Vec<Job<'a>> {
    if job.id.source != JobIdSource::Rendezvous {
        return vec![job];
    }
    let Job { id, mut rows } = job;
    rows.sort_by_key(|(member, _)| (member.started_ns, &member.run));
    let mut parts: Vec<(u64, Job<'a>)> = Vec::new();
    for (member, row) in rows {
        let end = member.ended_ns.unwrap_or(u64::MAX);
        match parts.last_mut() {
            Some((latest, part)) if member.started_ns.unwrap_or(0) <= *latest => {
                *latest = end.max(*latest);
                part.rows.push((member, row));
            }
            _ => parts.push((end, Job { id: id.clone(), rows: vec![(member, row)] })),
        }
    }
    let is_divided = parts.len() > 1;
    let name = |(_, mut part): (u64, Job<'a>)| {
        if let Some((first, _)) = part.rows.first().filter(|_| is_divided) {
            part.id.id = format!("{}@{}", part.id.id, first.run.name);
        }
        part
    };
    parts.into_iter().map(name).collect()
}

/// The jobs with the numbers of their runs and ranks, those that began last first.
fn list(jobs: &[Job<'_>]) -> String {
    let mut all: Vec<(Option<u64>, String)> = jobs
        .iter()
        .map(|job| {
            let began = job.rows.iter().filter_map(|(member, _)| member.started_ns).min();
            let distinct = |of: &dyn Fn(&(&Member, &MemberRow)) -> String| {
                job.rows.iter().map(of).collect::<std::collections::BTreeSet<_>>().len()
            };
            let runs = distinct(&|(member, _)| member.run.name.clone());
            let processes = distinct(&|(member, row)| format!("{}/{}", member.run.name, row.row.process.pid));
            let runs = memtrace_insight::units::number_text(runs as u64, "run");
            let processes = if processes == 1 { "1 process".to_owned() } else { format!("{processes} processes") };
            (began, format!("{} ({runs}, {processes})", job.id.id))
        })
        .collect();
    all.sort_by(|a, b| b.cmp(a));
    let more = all.len().saturating_sub(LISTED);
    let shown: Vec<String> = all.into_iter().take(LISTED).map(|(_, text)| text).collect();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", shown.join(", "))
}
