//! The structure of `memtrace live --once --json`. `analysis/schema/live.schema.json` describes it for other programs.

use schemars::JsonSchema;
use serde::Serialize;

use crate::json_text::json_text;
use crate::memory_totals::Totals;
use crate::schema_text::schema_text;
use crate::summary::{CategoryAmount, OwnerBytes};
use memtrace_input::load::HostLimitKind;
use memtrace_insight::passes::{Category, Phase};

/// The version of the structure: major.minor.
pub const LIVE_VERSION: &str = "1.1";

/// The figures of all selected recordings that run. A field whose name ends in `_bytes` is in bytes. A field whose name
/// ends in `_ns` is in nanoseconds.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct LiveReport {
    /// The version of this structure: major.minor. A new major version renames or removes fields.
    pub version: String,
    /// The time of these figures, since the Unix epoch.
    pub time_ns: u64,
    /// The recordings, by the process id of the launcher.
    pub recordings: Vec<LiveRecording>,
}

/// A running recording.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct LiveRecording {
    /// The process id of memtrace, which records.
    pub launcher_pid: u32,
    /// The absolute path of the run folder.
    pub folder: String,
    /// The recorded processes, by rank, then by process id.
    pub processes: Vec<LiveProcessReport>,
    /// Traces that could not be read, as text.
    pub problems: Vec<String>,
    /// The main memory of all processes of the command. Absent without samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<LiveHost>,
}

/// The main memory of all processes of a command, also of those that are not recorded.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct LiveHost {
    /// The bytes in the last sample, in which memory of several processes counts once, as far as it is known.
    pub bytes: u64,
    /// The most bytes of a sample.
    pub peak_bytes: u64,
    /// The kind of the limit.
    pub limit: HostLimitKind,
    /// The limit.
    pub limit_bytes: u64,
    /// The growth as a sentence. Absent if main memory does not grow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub growth: Option<String>,
}

/// A process that is being recorded.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct LiveProcessReport {
    /// The process id.
    pub pid: u32,
    /// The rank in a distributed job. Absent outside a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The number of ranks of the distributed job. Absent outside a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world_size: Option<u32>,
    /// The command line.
    pub argv: Vec<String>,
    /// The file name of the trace.
    pub trace: String,
    /// The number of events so far.
    pub events: u64,
    /// The number of events that could not be read.
    pub lost_events: u64,
    /// The number of earlier events that rotation has dropped (`memtrace run --keep`), whose effects are kept. Absent
    /// if none was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped_events: Option<u64>,
    /// The number of out-of-memory errors so far.
    pub oom_count: u64,
    /// The step, counted from 0. Absent before the first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// The phase of the latest allocation or free.
    pub phase: Phase,
    /// The devices, by ordinal.
    pub devices: Vec<LiveDevice>,
}

/// The memory of one device now.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct LiveDevice {
    /// The device ordinal; -1 is the CPU.
    pub device: i16,
    /// The name of the device. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The total memory of the device. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// The bytes in use on the device, of all processes and of the driver: the latest reading and what this process has
    /// allocated and freed since. Absent without a reading.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// The totals now.
    pub totals: Totals,
    /// The highest totals so far. They can belong to different points in time.
    pub highest: Totals,
    /// The allocated blocks, by category.
    pub by_category: Vec<CategoryAmount>,
    /// The device memory of this process, by the library that allocated it from CUDA, by bytes in descending order.
    pub by_owner: Vec<OwnerBytes>,
    /// The call stacks with the most bytes in allocated blocks, by bytes in descending order.
    pub stacks: Vec<LiveStack>,
    /// The largest tensors that have names, by bytes in descending order.
    pub tensors: Vec<LiveTensor>,
    /// How the allocated memory grows.
    pub growth: LiveGrowth,
}

/// The growth of allocated memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct LiveGrowth {
    /// The growth in a step: the median slope between the starts of the latest steps. Absent until three steps after
    /// the first have begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_step_bytes: Option<i64>,
    /// The growth in a minute. Without steps it is that of the lowest levels in the later half of the recording. Absent
    /// if too little was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_minute_bytes: Option<i64>,
    /// The time until no memory is left at this rate. Absent if nothing grows by at least 1 MiB in a minute, or if the
    /// memory that is left is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_in_ns: Option<u64>,
}

/// Allocated blocks with the same call stack, autograd node and category.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct LiveStack {
    /// The line of the program's own code, as in reports. Empty if the stack is unknown.
    pub location: String,
    /// The category of the blocks.
    pub category: Category,
    /// The bytes of the blocks.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// A tensor that has a name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct LiveTensor {
    /// Its names.
    pub name: String,
    /// Its data type and shape. Empty if they are unknown.
    pub shape: String,
    /// The category of its block.
    pub category: Category,
    /// The bytes of its block.
    pub bytes: u64,
}

impl LiveReport {
    /// The JSON Schema of this structure, generated from it and its documentation.
    pub fn json_schema() -> String {
        schema_text::<LiveReport>()
    }

    /// The report as JSON.
    pub fn to_json(&self) -> String {
        json_text(self)
    }
}
