//! The runs of a folder that are not of one job: a list from which the user chooses.

use std::path::PathBuf;

use memtrace_input::load::JobIdSource;

use super::member::Member;

/// The runs in a folder.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RunList {
    /// The folder that was read.
    pub path: PathBuf,
    /// The runs, the newest first.
    pub runs: Vec<ListedRun>,
    /// The parts that are missing in the list, as sentences without a period.
    pub notices: Vec<String>,
}

/// A run of the list.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ListedRun {
    /// The path of the run folder.
    pub path: PathBuf,
    /// When it began, in nanoseconds since the Unix epoch.
    pub started_ns: Option<u64>,
    /// The id of the distributed job that it is a part of.
    pub job: Option<String>,
    /// The first statement of its verdict.
    pub verdict: String,
}

impl RunList {
    pub(super) fn new(path: PathBuf, members: &[Member], notices: Vec<String>) -> RunList {
        let mut runs: Vec<ListedRun> = members
            .iter()
            .map(|member| ListedRun {
                path: member.run.path.clone(),
                started_ns: member.started_ns,
                job: member
                    .rows
                    .first()
                    .map(|row| member.job_of(row))
                    .filter(|job| job.source != JobIdSource::Run)
                    .map(|job| job.id),
                verdict: if member.is_running {
                    "Has not ended: the recording goes on, or memtrace was killed.".to_owned()
                } else {
                    member.verdict.clone()
                },
            })
            .collect();
        runs.sort_by(|a, b| b.started_ns.cmp(&a.started_ns).then_with(|| b.path.cmp(&a.path)));
        RunList { path, runs, notices }
    }
}
