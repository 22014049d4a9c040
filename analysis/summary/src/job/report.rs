//! The structure of `memtrace report DIR --json`: the ranks of one job beside each other.
//! `analysis/schema/job.schema.json` describes it for other programs.
//!
//! The doc comments of these types are the descriptions in the JSON Schema.

use schemars::JsonSchema;
use serde::Serialize;

use crate::conclusions::VerdictSummary;
use crate::json_text::json_text;
use crate::rank_table::RankTable;
use crate::summary::schema_text;

/// The version of the structure: major.minor.
///
/// - 2.1: `verdict`.
/// - 2.0: the ranks are those of `launch` in `summary.json`, with the same fields.
pub const JOB_VERSION: &str = "2.1";

/// The ranks of one job, merged from the runs of all its hosts. A field whose name ends in `_bytes` is in bytes. A
/// field whose name ends in `_ns` is in nanoseconds; points in time count from the Unix epoch, by the clock of their
/// host.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct JobReport {
    /// The version of this structure: major.minor. A new major version renames or removes fields.
    pub version: String,
    /// The folder that was read.
    pub path: String,
    /// The id of the job.
    pub job: String,
    /// The source of the id: `--job`, `SLURM_JOB_ID`, `TORCHELASTIC_RUN_ID`, `mpirun`, `RAY_JOB_ID`, `MASTER_ADDR`, or
    /// `run folder` if there was none.
    pub job_source: String,
    /// The runs of the job, by name.
    pub runs: Vec<JobRun>,
    /// The ranks of all runs, and the processes that belong to none.
    #[serde(flatten)]
    pub table: RankTable,
    /// The verdict as sentences.
    pub verdict: VerdictSummary,
    /// How the clocks of the hosts compare, by host. Empty with one host, and without common steps.
    pub clocks: Vec<HostClock>,
    /// The limits of the report, as sentences without a period.
    pub notices: Vec<String>,
}

/// The source of a run's figures.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunOrigin {
    /// Its `summary.json`.
    #[default]
    Summary,
    /// Its traces, because it has no usable summary.
    Traces,
    /// The table `ranks` of an export to Parquet.
    Parquet,
}

/// A run of the job.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct JobRun {
    /// The name: that of its folder, with `@` and the parent folders if several runs have it.
    pub name: String,
    /// The path of the run folder. Absent if an export was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The source of its figures.
    pub origin: RunOrigin,
    /// The host name. Empty if it is unknown.
    pub host: String,
    /// The version of memtrace that recorded it. Empty if it is unknown.
    pub memtrace_version: String,
    /// Whether the run has no end: it goes on, or memtrace was killed.
    pub is_running: bool,
    /// The start. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_ns: Option<u64>,
    /// The end. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_ns: Option<u64>,
}

/// The clock of a host beside that of the reference host, on which rank 0 runs, or the lowest recorded rank.
///
/// The figures come from the starts of steps. They contain both the difference of the clocks and the time by which one
/// host is really later, which nothing separates.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct HostClock {
    /// The host name.
    pub host: String,
    /// The number of steps that both hosts have in their summaries.
    pub common_steps: u64,
    /// By how many nanoseconds steps begin later on this host, by the clocks: the median over the common steps.
    pub later_ns: i64,
    /// The lowest of these differences.
    pub lowest_ns: i64,
    /// The highest of these differences.
    pub highest_ns: i64,
    /// The least by which the clocks differ, if every step waits for all ranks: by the clocks, a step began on one host
    /// after the second next one had begun on the other. 0 if the times are possible with equal clocks.
    pub differs_at_least_ns: u64,
}

impl JobReport {
    /// The JSON Schema of the report, generated from these structures and their documentation.
    pub fn json_schema() -> String {
        schema_text::<JobReport>()
    }

    /// The report as JSON.
    pub fn to_json(&self) -> String {
        json_text(self) + "\n"
    }
}
