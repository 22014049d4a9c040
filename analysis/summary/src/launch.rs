//! The structure of `summary.json`'s `launch`: what the processes of one launch have in common, and how they differ.
//!
//! A launch is all that one command started: ranks, DataLoader workers and helpers. The doc comments of these types are
//! the descriptions in the JSON Schema.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::issue_summary::IssueSummary;
use crate::rank_table::RankTable;
use memtrace_insight::StackSummary;

/// The processes of a launch beside each other.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LaunchSummary {
    /// The ranks, and the processes that belong to none.
    #[serde(flatten)]
    pub table: RankTable,
    /// The issues that concern several processes, by `bytes` in descending order.
    pub issues: Vec<LaunchIssueSummary>,
    /// The device memory of one process that another process of the launch opened (CUDA IPC), by `peak_bytes` in
    /// descending order.
    pub shared_memory: Vec<SharedMemorySummary>,
}

/// An issue that concerns several processes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LaunchIssueSummary {
    /// The issue. `device` is the ordinal in the first of `processes`.
    #[serde(flatten)]
    pub issue: IssueSummary,
    /// The processes to which the issue applies, by bytes in descending order.
    pub processes: Vec<IssueProcessSummary>,
}

/// A process to which an issue applies.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct IssueProcessSummary {
    /// The process id.
    pub pid: u32,
    /// The rank to which the process belongs. Absent if it belongs to none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The device ordinal in that process.
    pub device: i16,
    /// The bytes of this process.
    pub bytes: u64,
    /// The line that made the context, or that first allocated on the device. Empty if it is unknown.
    pub location: String,
}

/// Device memory of one process that another process opened (CUDA IPC).
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SharedMemorySummary {
    /// The process id of the process that opened the memory.
    pub importer_pid: u32,
    /// Its rank. Absent if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub importer_rank: Option<u32>,
    /// The device ordinal in the importer.
    pub importer_device: i16,
    /// The process id of the process that allocated the memory. Absent if no recorded export matches the import.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exporter_pid: Option<u32>,
    /// Its rank. Absent if it has none, or if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exporter_rank: Option<u32>,
    /// The device ordinal in the exporter. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exporter_device: Option<i16>,
    /// The highest number of bytes that were open at once.
    pub peak_bytes: u64,
    /// The bytes that were open at the peak of the exporter's device. Absent if the exporter is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_exporter_peak_bytes: Option<u64>,
    /// The bytes that were open at the end of the importer's recording.
    pub end_bytes: u64,
    /// The bytes that the importer still had open after the exporter had freed them. The device keeps this memory.
    pub kept_after_free_bytes: u64,
    /// The number of times that memory was opened.
    pub imports: u64,
    /// The call stack that opened most of these bytes. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opened_at: Option<StackSummary>,
}

impl LaunchIssueSummary {
    /// Whether the issue is about this process and this device of it.
    pub fn concerns(&self, pid: u32, device: i16) -> bool {
        self.processes.iter().any(|process| process.pid == pid && process.device == device)
    }
}
