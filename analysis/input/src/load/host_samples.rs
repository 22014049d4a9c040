//! The main memory of the run's processes in the launcher's samples: `host.jsonl` of a run folder.
//!
//! Samples show what held between two moments only as far as they are close together. Figures that the kernel itself
//! keeps do not depend on that: the highest memory of a process ([`HostProcess::peak_bytes`]) and of a control group
//! ([`HostSamplesEnd`]). A file without an end is that of a launcher that was killed, or still runs.

use std::collections::BTreeMap;

use memtrace_trace::file::{Budget, untrusted};
use memtrace_trace::named;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::folder::RunFolder;

/// The name of the file in a run folder.
pub const HOST_SAMPLES_FILE: &str = "host.jsonl";
/// The version of the format, in its first line.
pub const HOST_SAMPLES_VERSION: u32 = 1;
/// The launcher stops writing samples before the file is this large, in bytes.
pub const MAX_HOST_SAMPLES_BYTES: u64 = 4 << 20;

named! { serde
    /// The limit of the memory that a run can have.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
    pub enum HostLimitKind {
        /// The main memory of the machine.
        #[default]
        Machine => "machine",
        /// The limit of the command's control group, or of one above it: of a container, a pod or a Slurm step.
        ControlGroup => "control_group",
    }
}

/// One line of the file. Times are nanoseconds since the Unix epoch, sizes are bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum HostSamplesLine {
    /// The first line.
    Start {
        /// The format's version.
        version: u32,
        /// The time.
        time_ns: u64,
        /// The size of `/dev/shm`. 0 if it is unknown.
        #[serde(default)]
        shm_bytes: u64,
    },
    /// The limit from this time on.
    Limit {
        /// The time.
        time_ns: u64,
        /// The kind of the limit.
        limit: HostLimitKind,
        /// The limit.
        limit_bytes: u64,
    },
    /// A process, before the samples that list it, and again when it executes another program.
    Process {
        /// The process id, as the launcher sees it.
        pid: u32,
        /// The name of its program.
        name: String,
        /// The process that started it, if it is one of the run. Absent otherwise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        parent: Option<u32>,
    },
    /// The memory of all processes.
    Sample(HostSample),
    /// The files in shared memory that the processes have mapped, when they had the most of it so far.
    SharedFiles {
        /// The time.
        time_ns: u64,
        /// The files, those with the most bytes first.
        files: Vec<HostSharedFile>,
    },
    /// The last line.
    End {
        /// The time.
        time_ns: u64,
        /// How the sampling ended.
        #[serde(flatten)]
        end: HostSamplesEnd,
    },
}

/// The main memory of a run at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct HostSample {
    /// The time, in nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// The bytes of the control group, with its page cache. Absent without a group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_bytes: Option<u64>,
    /// The page cache of the control group: files that the kernel gives back when memory is short. Absent without a
    /// group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_cache_bytes: Option<u64>,
    /// The machine's memory for new programs without swapping (`MemAvailable`).
    pub available_bytes: u64,
    /// The bytes in use of `/dev/shm`, by any process.
    #[serde(default)]
    pub shm_used_bytes: u64,
    /// The processes.
    pub processes: Vec<HostProcess>,
}

/// The main memory of a process, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct HostProcess {
    /// The process id, as the launcher sees it.
    pub pid: u32,
    /// `RssAnon`: heap, stacks, and other memory without a file.
    pub anonymous_bytes: u64,
    /// `RssFile`: mapped files, such as libraries and memory-mapped weights.
    pub file_bytes: u64,
    /// `RssShmem`: shared memory.
    pub shared_bytes: u64,
    /// `VmHWM`: the most resident memory that the process ever had, as the kernel counts it.
    pub peak_bytes: u64,
    /// `Pss` of smaps_rollup: resident memory, in which memory of several processes counts in equal parts. Absent if it
    /// was not read in this sample, or may not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proportional_bytes: Option<u64>,
}

impl HostProcess {
    /// The resident bytes.
    pub fn resident_bytes(&self) -> u64 {
        self.anonymous_bytes.saturating_add(self.file_bytes).saturating_add(self.shared_bytes)
    }

    /// The bytes that count for the process: its proportional ones, otherwise the resident ones.
    pub fn bytes(&self) -> u64 {
        self.proportional_bytes.unwrap_or_else(|| self.resident_bytes())
    }
}

impl HostSample {
    /// The bytes of all processes, in which shared memory counts once as far as the sample knows.
    pub fn bytes(&self) -> u64 {
        self.processes.iter().map(HostProcess::bytes).fold(0, u64::saturating_add)
    }
}

/// A file in shared memory, or all files whose names differ in numbers only.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostSharedFile {
    /// The path. Digits are replaced by `*` where several files are counted.
    pub name: String,
    /// The bytes that are mapped, of each file once.
    pub bytes: u64,
    /// The number of files.
    pub files: u64,
    /// The number of processes that have mapped one of them.
    pub processes: u64,
}

/// A process of the samples.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostProcessName {
    /// The name of its program.
    pub name: String,
    /// The process that started it, if it is one of the run.
    pub parent: Option<u32>,
}

/// How the sampling ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct HostSamplesEnd {
    /// How often the processes were sampled.
    pub samples: u64,
    /// The longest time between two samples, in nanoseconds.
    pub longest_gap_ns: u64,
    /// The number of samples that are not in the file, because they differ little from those before or because of the
    /// file's bound.
    pub left_out: u64,
    /// The most memory that the control group ever had, as the kernel counts it. Absent without a group, and if the
    /// group had it before the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_peak_bytes: Option<u64>,
    /// How many processes of the control group the kernel killed during the run, because its memory was full.
    #[serde(default)]
    pub group_kills: u64,
    /// How many processes of the machine the kernel killed during the run, because memory was full.
    #[serde(default)]
    pub machine_kills: u64,
}

/// All samples of a run.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostSamples {
    /// The kind of the last limit.
    pub limit: HostLimitKind,
    /// The last limit, in bytes.
    pub limit_bytes: u64,
    /// The size of `/dev/shm`, in bytes.
    pub shm_bytes: u64,
    /// The processes, by pid.
    pub names: BTreeMap<u32, HostProcessName>,
    /// The samples, in the order of time.
    pub samples: Vec<HostSample>,
    /// The files in shared memory, when the processes had the most of it.
    pub shared_files: Vec<HostSharedFile>,
    /// How the sampling ended. `None` if the launcher was killed or still runs.
    pub end: Option<HostSamplesEnd>,
}

impl HostSamples {
    /// Reads the samples of a run folder. Without a file there are none. Lines that this version does not know are
    /// skipped.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is too large or is of a newer version.
    pub fn read_within(folder: &RunFolder, budget: &Budget) -> std::io::Result<HostSamples> {
        let file = match folder.open_file(HOST_SAMPLES_FILE) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(HostSamples::default()),
            Err(e) => return Err(e),
        };
        budget.add_file(&file)?;
        // The last lines may exceed the bound.
        let text = untrusted::read(&file, 2 * MAX_HOST_SAMPLES_BYTES)?;
        budget.hold(2 * text.len() as u64).map_err(std::io::Error::other)?;
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<HostSamplesLine> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        match lines.first() {
            Some(HostSamplesLine::Start { version, .. }) if *version > HOST_SAMPLES_VERSION => {
                Err(std::io::Error::other(format!("its version is {version}, and {HOST_SAMPLES_VERSION} is supported")))
            }
            _ => Ok(HostSamples::of(lines)),
        }
    }

    /// Collects the lines of a file.
    pub fn of(lines: impl IntoIterator<Item = HostSamplesLine>) -> HostSamples {
        let mut all = HostSamples::default();
        for line in lines {
            match line {
                HostSamplesLine::Start { shm_bytes, .. } => all.shm_bytes = shm_bytes,
                HostSamplesLine::Limit { limit, limit_bytes, .. } => {
                    (all.limit, all.limit_bytes) = (limit, limit_bytes)
                }
                HostSamplesLine::Process { pid, name, parent } => {
                    all.names.insert(pid, HostProcessName { name, parent });
                }
                // Times decide which sample held when, so a line that goes back in time is none.
                HostSamplesLine::Sample(sample) => {
                    if all.samples.last().is_none_or(|last| last.time_ns <= sample.time_ns) {
                        all.samples.push(sample);
                    }
                }
                HostSamplesLine::SharedFiles { files, .. } => all.shared_files = files,
                HostSamplesLine::End { end, .. } => all.end = Some(end),
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(time_ns: u64, anonymous_bytes: u64) -> HostSample {
        let process = HostProcess { pid: 7, anonymous_bytes, ..HostProcess::default() };
        HostSample { time_ns, processes: vec![process], ..HostSample::default() }
    }

    #[test]
    fn samples_of_a_killed_launcher_are_read_up_to_the_cut() {
        let path = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(path.path()).unwrap();
        assert_eq!(HostSamples::read_within(&folder, &Budget::default()).unwrap(), HostSamples::default());
        let lines = [
            HostSamplesLine::Start { version: 1, time_ns: 1, shm_bytes: 64 },
            HostSamplesLine::Limit { time_ns: 1, limit: HostLimitKind::ControlGroup, limit_bytes: 1000 },
            HostSamplesLine::Process { pid: 7, name: "python3".to_owned(), parent: None },
            HostSamplesLine::Sample(sample(5, 100)),
            HostSamplesLine::Sample(sample(4, 900)),
            HostSamplesLine::Sample(sample(6, 200)),
        ];
        let mut text: String = lines.iter().map(|line| format!("{}\n", serde_json::to_string(line).unwrap())).collect();
        text.push_str("{\"kind\":\"swap\",\"bytes\":40}\n{\"kind\":\"samp");
        std::fs::write(path.path().join(HOST_SAMPLES_FILE), &text).unwrap();
        let read = HostSamples::read_within(&folder, &Budget::default()).unwrap();
        assert_eq!((read.limit, read.limit_bytes), (HostLimitKind::ControlGroup, 1000));
        let bytes: Vec<u64> = read.samples.iter().map(HostSample::bytes).collect();
        assert_eq!((bytes, read.end), (vec![100, 200], None));
        assert_eq!(read.names[&7].name, "python3");
        std::fs::write(path.path().join(HOST_SAMPLES_FILE), text.replace("\"version\":1", "\"version\":2")).unwrap();
        let error = HostSamples::read_within(&folder, &Budget::default()).unwrap_err().to_string();
        assert_eq!(error, "its version is 2, and 1 is supported");
    }

    #[test]
    fn hostile_sizes_do_not_overflow() {
        let process =
            HostProcess { anonymous_bytes: u64::MAX, file_bytes: u64::MAX, shared_bytes: 1, ..HostProcess::default() };
        let sample = HostSample { processes: vec![process; 3], ..HostSample::default() };
        assert_eq!(sample.bytes(), u64::MAX);
    }
}
