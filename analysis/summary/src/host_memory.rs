//! The main memory of the run's processes: the peak, who had it, how it grows, and whether the kernel killed a process
//! because it was full.
//!
//! All figures are the launcher's samples and the kernel's counters, so they depend on when a sample was taken. Nothing
//! else in a summary rests on them but the cause of a SIGKILL.

use memtrace_input::load::{HostLimitKind, HostProcess, HostSample, HostSharedFile};
use memtrace_insight::units::{count_text, share_text, size_text};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Reports mention growth that reaches the limit within this time, in nanoseconds: a week.
const SOON_NS: u64 = 7 * 24 * 3600 * 1_000_000_000;
/// Reports mention main memory of which this share of the limit was in use, in percent.
const NOTABLE_PERCENT: u64 = 50;

/// The main memory of the run's processes, in samples of the launcher and counters of the kernel.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostMemorySummary {
    /// The peak as a sentence: `212 GiB of 256 GiB (83%)`.
    pub text: String,
    /// The kind of the limit: the main memory of the machine, or the limit of the command's control group.
    pub limit: HostLimitKind,
    /// The limit, in bytes.
    pub limit_bytes: u64,
    /// The sample with the most bytes.
    pub peak: HostMemoryState,
    /// The last sample.
    pub end: HostMemoryState,
    /// The most bytes that the control group ever had, with its page cache, as the kernel counts them. Absent without a
    /// group, and if the group had it before the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_peak_bytes: Option<u64>,
    /// The processes at the peak, most bytes first. At most 32.
    pub processes: Vec<HostProcessMemory>,
    /// The number of processes at the peak that are not listed.
    pub unlisted_processes: u64,
    /// The files in shared memory that the processes had mapped, when they had the most of it. At most 16.
    pub shared_files: Vec<HostSharedFile>,
    /// The size of `/dev/shm`, in bytes. 0 if it is unknown.
    pub shm_bytes: u64,
    /// The most bytes of `/dev/shm` that were in use by any process.
    pub shm_peak_bytes: u64,
    /// The peak of pinned host memory, summed over the processes. Each has its own moment.
    pub pinned_bytes: u64,
    /// The growth. Absent if main memory does not grow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub growth: Option<HostGrowth>,
    /// The kernel killed a process because main memory was full. Absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kill: Option<HostKill>,
    /// The number of samples.
    pub samples: u64,
    /// The longest time between two samples, in nanoseconds. Absent if the launcher was killed or still runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_gap_ns: Option<u64>,
    /// The number of samples that were not kept.
    pub left_out: u64,
    /// The history: at most 200 of the samples, with the peak.
    pub history: Vec<HostMemoryState>,
}

/// The main memory of all processes at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostMemoryState {
    /// The time, in nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// The bytes of all processes, in which memory of several processes counts once (`Pss`), as far as it is known.
    pub bytes: u64,
    /// The resident bytes without a file: heap and stacks. Memory of several processes counts in each.
    pub anonymous_bytes: u64,
    /// The resident bytes of mapped files. Memory of several processes counts in each.
    pub file_bytes: u64,
    /// The resident bytes of shared memory. Memory of several processes counts in each.
    pub shared_bytes: u64,
    /// The bytes of the control group, with its page cache. Absent without a group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_bytes: Option<u64>,
    /// The page cache of the control group, which the kernel gives back when memory is short. Absent without a group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_cache_bytes: Option<u64>,
    /// The machine's memory for new programs without swapping.
    pub available_bytes: u64,
}

/// The main memory of a process at the peak of all.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostProcessMemory {
    /// The process id.
    pub pid: u32,
    /// The name of its program, and its rank, if it has one: `python3 (rank 0)`.
    pub name: String,
    /// The bytes, in which memory of several processes counts in equal parts, if that is known.
    pub bytes: u64,
    /// The resident bytes without a file.
    pub anonymous_bytes: u64,
    /// The resident bytes of mapped files.
    pub file_bytes: u64,
    /// The resident bytes of shared memory.
    pub shared_bytes: u64,
    /// The most resident bytes that the process ever had, as the kernel counts them.
    pub highest_bytes: u64,
}

/// Main memory that grows.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostGrowth {
    /// The growth as a sentence, with the time to the limit at this rate.
    pub text: String,
    /// The bytes that are added in an hour.
    pub bytes_per_hour: u64,
    /// The bytes that are added with each training step. Absent without steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_step: Option<u64>,
    /// The time from the last sample until the limit is reached at this rate, in nanoseconds. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_in_ns: Option<u64>,
}

/// The kernel's out-of-memory killer.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostKill {
    /// Whether the kernel counted a kill in the command's control group. Otherwise it killed a process of the machine,
    /// or the launcher's recording ends at the limit.
    pub is_certain: bool,
    /// The end of the command: `killed by the kernel: main memory was full`.
    pub outcome: String,
    /// Who had the memory, as a sentence.
    pub text: String,
}

impl HostMemorySummary {
    /// The bytes that can still be added after this sample. `None` if the limit is unknown.
    pub(crate) fn left_to_limit(&self, sample: &HostSample) -> Option<u64> {
        match (self.limit, sample.group_bytes) {
            (HostLimitKind::ControlGroup, Some(bytes)) => {
                let used = bytes.saturating_sub(sample.group_cache_bytes.unwrap_or(0));
                Some(self.limit_bytes.saturating_sub(used))
            }
            _ => (sample.available_bytes > 0).then_some(sample.available_bytes),
        }
    }

    pub(crate) fn peak_text(&self) -> String {
        let of = format!(
            "{} of {} ({}), {}",
            size_text(self.peak.bytes),
            size_text(self.limit_bytes),
            share_text(self.peak.bytes, self.limit_bytes),
            limit_text(self.limit)
        );
        match self.pinned_bytes {
            0..1_048_576 => of,
            bytes => format!("{of}; pinned host memory: {}", size_text(bytes)),
        }
    }

    /// Whether a report mentions it unasked: much is in use, it grows towards the limit, or the kernel killed a
    /// process.
    pub fn is_notable(&self) -> bool {
        let is_much = |bytes: u64, of: u64| of > 0 && bytes.saturating_mul(100) / NOTABLE_PERCENT >= of;
        self.kill.is_some()
            || self.growth.as_ref().and_then(|growth| growth.limit_in_ns).is_some_and(|ns| ns <= SOON_NS)
            || is_much(self.peak.bytes, self.limit_bytes)
            || (is_much(self.shm_peak_bytes, self.shm_bytes) && self.shm_text().is_some())
    }

    /// Shared memory as text. `None` if the processes have none.
    pub fn shm_text(&self) -> Option<String> {
        let first = self.shared_files.iter().find(|file| file.name.starts_with("/dev/shm/"))?;
        let files = if first.files == 1 { String::new() } else { format!(" in {} files", count_text(first.files)) };
        let mapped = format!("{} mapped{files} at {}", size_text(first.bytes), first.name);
        Some(match self.shm_bytes {
            0 => mapped,
            total => format!(
                "{} of {} ({}) in use; most: {mapped}",
                size_text(self.shm_peak_bytes),
                size_text(total),
                share_text(self.shm_peak_bytes, total)
            ),
        })
    }
}

impl HostMemoryState {
    pub(crate) fn of(sample: &HostSample) -> HostMemoryState {
        let sum = |part: fn(&HostProcess) -> u64| sample.processes.iter().map(part).fold(0, u64::saturating_add);
        HostMemoryState {
            time_ns: sample.time_ns,
            bytes: sample.bytes(),
            anonymous_bytes: sum(|process| process.anonymous_bytes),
            file_bytes: sum(|process| process.file_bytes),
            shared_bytes: sum(|process| process.shared_bytes),
            group_bytes: sample.group_bytes,
            group_cache_bytes: sample.group_cache_bytes,
            available_bytes: sample.available_bytes,
        }
    }
}

/// A limit in words.
pub(crate) fn limit_text(limit: HostLimitKind) -> &'static str {
    match limit {
        HostLimitKind::ControlGroup => "the control group's limit",
        HostLimitKind::Machine => "the machine's memory",
    }
}
