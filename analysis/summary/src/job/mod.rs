//! One job on many hosts: merges the run folders that its launchers wrote, without a replay of their events.
//!
//! The source of truth is the `summary.json` of each run, which its own launcher wrote. A run without one, such as a
//! run that goes on, is analyzed from its traces. Partitioned Parquet tables have the same rows (`ranks`).

mod clock;
mod comparison;
mod folders;
mod member;
mod merge;
mod notice;
mod report;
mod run_list;
mod selection;
mod table;
mod verdict;

pub use folders::{FoundRun, find_runs, is_run_folder};
pub use member::{rank_rows, rank_rows_of_run};
pub use merge::{JobOptions, JobOrRuns, job_or_runs, job_report};
pub use report::{HostClock, JOB_VERSION, JobReport, JobRun, RunOrigin};
pub use run_list::{ListedRun, RunList};
