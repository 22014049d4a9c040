//! The structure of `memtrace report DIR --json`: the ranks of one job beside each other.
//! `analysis/schema/job.schema.json` describes it for other programs.
//!
//! The doc comments of these types are the descriptions in the JSON Schema.

use memtrace_input::load::Exit;
use memtrace_input::printable;
use memtrace_insight::passes::Phase;
use schemars::JsonSchema;
use serde::Serialize;

use super::comparison::JobComparison;
use crate::summary::schema_text;

/// The version of the structure: major.minor.
pub const JOB_VERSION: &str = "1.0";

/// The ranks of one job, merged from the runs of all its hosts. A field whose name ends in `_bytes` is in bytes. A field
/// whose name ends in `_ns` is in nanoseconds; points in time count from the Unix epoch, by the clock of their host.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct JobReport {
    /// The version of this structure: major.minor. A new major version renames or removes fields.
    pub version: String,
    /// The folder that was read.
    pub path: String,
    /// The id of the job.
    pub job: String,
    /// What gave the id: `--job`, `SLURM_JOB_ID`, `TORCHELASTIC_RUN_ID`, `mpirun`, `RAY_JOB_ID`, `MASTER_ADDR`, or `run
    /// folder` if nothing did.
    pub job_source: String,
    /// The runs of the job, by name.
    pub runs: Vec<JobRun>,
    /// The number of ranks of the job, as its processes report it. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world_size: Option<u32>,
    /// The recorded ranks. Ranks with out-of-memory errors come first, then those with the highest peak of allocated
    /// bytes.
    pub ranks: Vec<JobRank>,
    /// The number of ranks that no run has.
    pub missing_ranks_count: u64,
    /// The first 64 of these ranks, in ascending order.
    pub missing_ranks: Vec<u32>,
    /// How far the peaks of the ranks differ. Absent with fewer than two ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub imbalance: Option<JobImbalance>,
    /// What the rank with the highest peak has more than the median rank. Absent if their peaks differ by less than a
    /// hundredth, and without their traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst_against_median: Option<JobComparison>,
    /// Processes that are no rank and allocated device memory, by peak in descending order: workers, helpers, and
    /// earlier processes of a rank.
    pub other_processes: Vec<JobProcess>,
    /// How the clocks of the hosts compare, by host. Empty with one host, and without common steps.
    pub clocks: Vec<HostClock>,
    /// What limits the report, as sentences without a period.
    pub notices: Vec<String>,
}

/// What the figures of a run were read from.
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
    /// What its figures were read from.
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

/// A rank of the job.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct JobRank {
    /// The rank.
    pub rank: u32,
    /// The name of its run.
    pub run: String,
    /// The host name. Empty if it is unknown.
    pub host: String,
    /// The process id on its host.
    pub pid: u32,
    /// The file name of the trace in the run folder.
    pub trace: String,
    /// The rank's own device: the one with an out-of-memory error, else the one with the highest peak. -1 is the CPU.
    pub device: i16,
    /// The total memory of that device. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// The highest number of allocated bytes on that device.
    pub peak_bytes: u64,
    /// The highest number of reserved bytes on that device. It can belong to another point in time.
    pub reserved_bytes: u64,
    /// The highest number of allocated bytes in each phase, over all steps.
    pub phases: Vec<JobPhasePeak>,
    /// The number of out-of-memory errors on that device.
    pub oom_count: u64,
    /// The other devices on which the process allocated memory.
    pub other_devices: Vec<JobDevice>,
    /// How the process ended.
    pub exit: Exit,
    /// The number of recorded events of the process.
    pub events: u64,
    /// The number of events that are known to be missing.
    pub lost_events: u64,
}

/// The highest number of allocated bytes of a rank in one phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct JobPhasePeak {
    /// The phase.
    pub phase: Phase,
    /// The highest number of allocated bytes of the rank's own device during the phase.
    pub peak_bytes: u64,
}

/// A device that is not the rank's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct JobDevice {
    /// The device ordinal; -1 is the CPU.
    pub device: i16,
    /// The highest number of allocated bytes.
    pub peak_bytes: u64,
    /// The highest number of reserved bytes.
    pub reserved_bytes: u64,
}

/// A process that is no rank.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct JobProcess {
    /// The name of its run.
    pub run: String,
    /// The host name. Empty if it is unknown.
    pub host: String,
    /// The process id on its host.
    pub pid: u32,
    /// The rank that it inherited. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The device ordinal; -1 is the CPU.
    pub device: i16,
    /// The highest number of allocated bytes.
    pub peak_bytes: u64,
}

/// How far the peaks of the ranks differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct JobImbalance {
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
        schema_text(&schemars::schema_for!(JobReport))
    }

    /// The report as JSON.
    pub fn to_json(&self) -> String {
        // Serializing these plain structures cannot fail.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        printable::json(text)
    }
}
