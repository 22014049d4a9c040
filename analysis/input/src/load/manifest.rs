//! `run.json`, the manifest of a run. The launcher writes it and the analysis reads it, both through [`Manifest`].
//! `analysis/schema/run.schema.json` describes it for other programs.
//!
//! Every field can be absent, because a run folder can outlive the launcher that was writing it. Readers ignore unknown
//! fields. Removing or renaming a field raises the version. All times are nanoseconds since the Unix epoch; the start
//! and the end of the run are also given as text.

use std::io::{self, Write};

use memtrace_trace::file::Budget;
use memtrace_trace::printable;
use memtrace_trace::unrecorded::Unrecorded;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

use crate::error::{Error, Result};
use crate::folder::RunFolder;
use crate::json_file;

use super::workload::Workload;

/// The reason why a statically linked program is not recorded.
pub const STATICALLY_LINKED: &str = "it is statically linked";

/// The format version. It is raised when a field changes its name or meaning.
pub const MANIFEST_VERSION: u32 = 2;
/// The manifest's file name in the run folder.
pub const MANIFEST_FILE: &str = "run.json";
/// The largest manifest that is read, in bytes: about that of a run with 65,536 processes.
pub const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct Exit {
    /// The exit status. Absent if the process did not exit, or if its end is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// The number of the signal that ended the process. Absent if no signal ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
}

impl Exit {
    /// Decodes the status word of `wait(2)`.
    pub fn from_wait_status(status: i32) -> Exit {
        // As WIFEXITED, WEXITSTATUS and WTERMSIG of wait(2).
        match status & 0x7f {
            0 => Exit { code: Some((status >> 8) & 0xff), signal: None },
            signal => Exit { code: None, signal: Some(signal) },
        }
    }

    /// The end as text: `finished`, `exit status 1` or `killed by SIGKILL`. `None` if it is unknown.
    pub fn text(self) -> Option<String> {
        match (self.signal, self.code) {
            (Some(signal), _) => Some(format!("killed by {}", signal_name(signal))),
            (None, Some(0)) => Some("finished".to_owned()),
            (None, Some(code)) => Some(format!("exit status {code}")),
            (None, None) => None,
        }
    }

    fn is_unknown(&self) -> bool {
        *self == Exit::default()
    }

    /// Whether the process succeeded; `None` if it is unknown how it ended.
    pub fn success(&self) -> Option<bool> {
        match (self.code, self.signal) {
            (_, Some(_)) => Some(false),
            (Some(code), None) => Some(code == 0),
            (None, None) => None,
        }
    }
}

/// The name of a signal, for example `SIGKILL`. The numbers are those of Linux on x86-64 and aarch64.
fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "SIGHUP",
        2 => "SIGINT (Ctrl-C)",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        10 => "SIGUSR1",
        11 => "SIGSEGV",
        12 => "SIGUSR2",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

/// A process image that recorded events.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ManifestProcess {
    /// The process id.
    pub pid: u32,
    /// The trace's file name in the run folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
    /// The parent's process id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ppid: Option<u32>,
    /// The command line.
    pub argv: Vec<String>,
    /// The executable. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exe: Option<String>,
    /// The folder in which it runs. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// The host's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The version of memtrace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memtrace: Option<String>,
    /// When the process started. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_ns: Option<u64>,
    /// The recorded environment variables: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `SLURM_*`, ...
    pub env: BTreeMap<String, String>,
    /// The pod, container, Slurm job and user of the process.
    #[serde(skip_serializing_if = "Workload::is_unknown")]
    pub workload: Workload,
    /// The rank in a distributed job, as the process gave it to PyTorch (`torch.distributed`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The number of ranks of that job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world_size: Option<u32>,
    /// When the recording began. No event is older.
    pub recording_started_ns: u64,
    /// When the recording ended.
    pub ended_ns: u64,
    /// `exited`, `replaced by exec`, `detached` or `still running`.
    pub end_reason: String,
    /// How it ended. Absent if the launcher did not see it.
    #[serde(skip_serializing_if = "Exit::is_unknown")]
    pub exit: Exit,
    /// The number of events that the launcher took from the process.
    pub events: u64,
    /// The number of events that have a sequence number and never arrived.
    pub lost: u64,
    /// The number of events that are out of order in the trace.
    pub late: u64,
    /// The number of events that did not reach the file.
    pub unwritten: u64,
    /// The length of the trace when its recording had ended, in bytes. 0 if it is unknown.
    pub bytes: u64,
    /// The number of malformed records in the shared memory of the process.
    pub corrupt: u64,
    /// The number of definitions that were refused because they were malformed or over the limit.
    pub definitions_refused: u64,
    /// Why the trace could not be written. Absent if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_error: Option<String>,
    /// The counters of the process that are not 0.
    pub counters: BTreeMap<String, u64>,
    /// The notices from parts of the recorder.
    pub notices: Vec<ManifestNotice>,
}

/// A notice from one part of the recorder.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ManifestNotice {
    /// The part that reports, for example `torch.tracker`.
    pub topic: String,
    /// The message.
    pub text: String,
    /// `works`, `off` or `remark`.
    pub status: String,
}

/// The machine on which a run was made.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Machine {
    /// Its host name.
    pub name: String,
    /// The kernel's release, for example `6.8.0-45-generic`.
    pub kernel: String,
    /// The number of processors that the launcher may use.
    pub cpus: usize,
    /// The total main memory, in bytes.
    pub memory_bytes: u64,
    /// The version line of the NVIDIA driver. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvidia_driver: Option<String>,
}

/// How the processes of the command were found.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Discovery {
    /// The kernel reported every program that was executed.
    KernelReports,
    /// Scans of `/proc` found processes that lived long enough.
    #[default]
    Scans,
}

/// Whether a run has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// The launcher still runs, or was killed.
    Running,
    /// The launcher has written everything.
    Ended,
}

/// A process of the command that could not be recorded.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct UnrecordableProcess {
    /// The process id.
    pub pid: u32,
    /// The path of its executable. Empty if it is unknown.
    pub program: String,
    /// The reason as text.
    pub reason: String,
    /// Whether it was seen with CUDA loaded. False if this is unknown.
    pub uses_cuda: bool,
    /// The number of events that it lost at least. 0 if this is unknown.
    pub lost_events: u64,
}

/// Something that is not in the recording of a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NotRecorded {
    /// Whether events are known to be lost, or likely: a process that used CUDA, or that requested to be recorded.
    pub is_loss: bool,
    /// A sentence without a period.
    pub text: String,
}

impl ManifestProcess {
    /// The sentence about a trace that is not what the launcher wrote. `None` if it is, or if its length is unknown.
    fn changed_trace(&self, folder: &RunFolder) -> Option<String> {
        let trace = self.trace.as_ref().filter(|_| self.bytes > 0)?;
        let name = printable::line(trace);
        match folder.open_file(trace).and_then(|file| file.metadata()) {
            Ok(metadata) if metadata.len() >= self.bytes => None,
            Ok(metadata) => Some(format!(
                "the trace {name} has {} of the {} bytes that memtrace wrote: something cut it",
                metadata.len(),
                self.bytes
            )),
            Err(_) => Some(format!(
                "the trace {name} of process {} was removed, with {} events that memtrace wrote",
                self.pid, self.events
            )),
        }
    }
}

impl UnrecordableProcess {
    /// The process that made this report about itself.
    pub fn from_report(report: Unrecorded) -> UnrecordableProcess {
        let reason = report.reason.text().to_owned();
        let Unrecorded { pid, program, events, .. } = report;
        UnrecordableProcess { pid, program, reason, uses_cuda: true, lost_events: events }
    }
}

/// The simulated GPUs of a dry run (`memtrace dry-run`). Kernels did not run; the figures are those of allocations.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct SimulatedGpus {
    /// The name of the GPU's model.
    pub gpu: String,
    /// The memory of each GPU that a program can use, with its context, in bytes.
    pub memory_bytes: u64,
    /// The number of GPUs.
    pub count: u32,
    /// The exception that ended the program, where a value that no kernel computed can be its reason. Absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exception: Option<ValueException>,
    /// The workspaces of cuDNN. Absent if the program used no convolutions of cuDNN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspaces: Option<EstimatedWorkspaces>,
    /// The functions of CUDA's driver and runtime, and of kernels that FlashInfer could not compile, that the program
    /// called and the simulation lacks. Absent if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_functions: Vec<MissingFunction>,
    /// The lines of the program at which values that no kernel computed decided a size: those of policies first, then
    /// the largest. Absent if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guessed_sizes: Vec<GuessedSize>,
    /// The lines of the program at which numbers that no kernel computed decided a branch or a size, after the program
    /// had read them. Absent if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guessed_branches: Vec<GuessedBranch>,
    /// The peaks of two more runs, with the smallest and the largest sizes that estimates allow (`--bounds`). Absent
    /// without them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bounds: Option<PeakBounds>,
    /// Whether the program was ended because it answered requests (`--until-ready`). Absent otherwise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub was_ready: bool,
}

/// A line of the program of a dry run at which values that no kernel computed decided how many elements an operator
/// selects.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct GuessedSize {
    /// The innermost line outside of PyTorch, as FILE:LINE.
    pub location: String,
    /// The operator, as PyTorch names it: `nonzero` also for masks.
    pub operator: String,
    /// How often it ran, in all processes.
    pub times: u64,
    /// The number of elements that it selected, when it selected from the most.
    pub selected: u64,
    /// The number of elements from which it selected then. With `--nonzero zero` it selects none where a policy
    /// decides, with `full` all of them.
    pub total: u64,
    /// True if `--nonzero` decided. False if random numbers did: those of a GPU select about as many.
    pub is_assumed: bool,
}

impl GuessedSize {
    /// Adds what another process knows of the same line.
    pub fn add(&mut self, other: &GuessedSize) {
        self.times = self.times.saturating_add(other.times);
        self.is_assumed |= other.is_assumed;
        if other.total > self.total {
            (self.selected, self.total) = (other.selected, other.total);
        }
    }
}

/// The reason why a number that no kernel computed matters at a line of the program of a dry run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GuessedKind {
    /// A test such as that of `if` or `while`.
    #[default]
    Branch,
    /// An index, or an argument of a function that makes or shapes tensors.
    Size,
}

/// A line of the program of a dry run at which a number that no kernel computed decided the course.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct GuessedBranch {
    /// The line, as FILE:LINE. It can be after the one that read the number.
    pub location: String,
    /// The kind of decision.
    pub kind: GuessedKind,
    /// The class of PyTorch's optimizer that asked. It goes on to its limits, so its state and its calls of the closure
    /// are upper bounds. Absent for the program's own decisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<String>,
    /// How often such a number was read, in all processes.
    pub times: u64,
}

/// The peaks of two more runs of a dry run's command.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct PeakBounds {
    /// The run with `--nonzero zero` and the smallest workspaces of cuDNN.
    pub smallest: BoundingRun,
    /// The run with `--nonzero full` and the largest workspaces of cuDNN.
    pub largest: BoundingRun,
}

/// One of the runs of [`PeakBounds`].
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct BoundingRun {
    /// The peak of allocated memory in bytes, on the device with the least memory left.
    pub allocated_bytes: u64,
    /// The peak of reserved memory in bytes, on that device.
    pub reserved_bytes: u64,
    /// Whether it ran out of memory.
    pub is_out_of_memory: bool,
    /// Whether it failed for another reason, so that its peaks are those up to there.
    pub has_failed: bool,
}

/// A function that the program of a dry run called and the simulation lacks.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct MissingFunction {
    /// Its name. That of a kernel of FlashInfer is `flashinfer.MODULE.FUNCTION`.
    pub name: String,
    /// The number of its calls, in all processes.
    pub calls: u64,
}

/// A Python exception, other than an out-of-memory error, that ended a program after it had read values of a GPU.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct ValueException {
    /// The name of the exception's class.
    pub exception: String,
    /// The innermost line outside of PyTorch, as FILE:LINE.
    pub location: String,
    /// The last line that read a value, as FILE:LINE.
    pub read_location: String,
}

impl ValueException {
    /// A sentence that says what ended the program, and why a dry run can be the reason.
    pub fn text(&self) -> String {
        let Self { exception, location, read_location } = self;
        format!(
            "{exception} at {location}. A dry run computes no values; the program last read some at {read_location}."
        )
    }
}

/// The workspaces that cuDNN requests for convolutions in a dry run. They were measured on a GPU, or are estimated from
/// similar convolutions that were.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct EstimatedWorkspaces {
    /// The number of different convolutions and backward passes, of the process with the most.
    pub convolutions: u64,
    /// How many of them are estimated.
    pub estimated: u64,
    /// By how many bytes a peak of allocated memory can be higher on a GPU, because a workspace is larger.
    pub above_bytes: u64,
    /// By how many bytes a peak of allocated memory can be lower on a GPU, because a workspace is smaller.
    pub below_bytes: u64,
}

impl EstimatedWorkspaces {
    /// Adds what another process knows. The ranges are those of one process, since each has its own peak.
    pub fn add(&mut self, other: &EstimatedWorkspaces) {
        if other.convolutions > self.convolutions {
            (self.convolutions, self.estimated) = (other.convolutions, other.estimated);
        }
        self.above_bytes = self.above_bytes.max(other.above_bytes);
        self.below_bytes = self.below_bytes.max(other.below_bytes);
    }
}

/// The content of `run.json`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Manifest {
    /// The value of [`MANIFEST_VERSION`] when the run was made.
    pub version: u32,
    /// The version of memtrace that recorded the run.
    pub memtrace: String,
    /// The command and its arguments.
    pub command: Vec<String>,
    /// The folder it was started in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// The host's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
    /// The job's id, if the user gave one (`--job`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Whether the run has ended. If nothing runs any more, `running` means that the launcher was killed. Absent before
    /// memtrace 0.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<RunState>,
    /// The start of the command, as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started: Option<String>,
    /// The start of the command, in nanoseconds since the Unix epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_ns: Option<u64>,
    /// The end of the run, as text. Absent until then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// The end of the run, in nanoseconds since the Unix epoch. Absent until then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_ns: Option<u64>,
    /// How memtrace attached to a process that ran already. Absent where it started the command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attached: Option<AttachedRun>,
    /// The process id of the command itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// How the command ended. Absent until then.
    #[serde(skip_serializing_if = "Exit::is_unknown")]
    pub exit: Exit,
    /// Every process image that recorded events, in the order in which their recordings began.
    pub processes: Vec<ManifestProcess>,
    /// Sums over all processes: `events`, `lost`, `late`, `unwritten`, `dropped`.
    pub losses: BTreeMap<String, u64>,
    /// The number of refused recording requests, by reason.
    pub refused: BTreeMap<String, u64>,
    /// Processes of the command that could not be recorded, as far as they were found.
    pub unrecordable: Vec<UnrecordableProcess>,
    /// The number of further ones.
    pub unlisted: u64,
    /// The number of programs that ended before the launcher could check whether they can be recorded.
    pub unchecked: u64,
    /// The simulated GPUs of a dry run. Absent where the program ran on real ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulated: Option<SimulatedGpus>,
    /// How much memory of each GPU the command saw, in bytes. Absent without a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// How the processes of the command were found. Absent until the run ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discovery: Option<Discovery>,
    /// A sentence for each trace that is not as the launcher wrote it ([`Manifest::check_traces`]).
    #[serde(skip)]
    pub changed_traces: Vec<String>,
}

/// How memtrace attached to a process that ran already.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AttachedRun {
    /// How long the process had run, in nanoseconds. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ran_ns: Option<u64>,
    /// How long its threads were stopped together, one at a time, until one could load the library, in nanoseconds.
    /// Absent if Python itself has loaded it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_ns: Option<u64>,
    /// How long the thread that loaded the library did not go on with the program, in nanoseconds.
    pub loading_ns: u64,
}

impl AttachedRun {
    /// Describes the limits of such a recording.
    fn limits(&self) -> String {
        const SECOND: u64 = 1_000_000_000;
        let since = self.ran_ns.map_or_else(String::new, |ns| match ns / SECOND {
            seconds @ 0..120 => format!(" {seconds} s after the start of the program"),
            seconds @ 120..7200 => format!(" {} min after the start of the program", seconds / 60),
            seconds => format!(" {} h after the start of the program", seconds / 3600),
        });
        format!(
            "memtrace attached{since}: what was in use then has no call stack, and calls of the CUDA driver that \
             libraries had bound before are not recorded"
        )
    }
}

impl Manifest {
    /// Reads the manifest of a run folder; `Ok(None)` if there is none.
    ///
    /// # Errors
    ///
    /// If the manifest cannot be read. That is only a problem for the report, because the traces beside it remain
    /// usable.
    pub fn read(folder: &RunFolder) -> Result<Option<Manifest>> {
        Manifest::read_within(folder, &Budget::default())
    }

    /// [`Self::read`] within the budget of a run.
    pub(super) fn read_within(folder: &RunFolder, budget: &Budget) -> Result<Option<Manifest>> {
        let fail = |e| Error::io(format!("cannot read {}", folder.path().join(MANIFEST_FILE).display()))(e);
        match folder.open_file(MANIFEST_FILE).and_then(|file| json_file::read(&file, MAX_MANIFEST_BYTES, budget)) {
            Ok(manifest) => Ok(Some(manifest)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(fail(e)),
        }
    }

    /// Writes `run.json` into a run folder. The new file replaces the old one only when it is complete.
    ///
    /// # Errors
    ///
    /// Those of the file system.
    pub fn write(&self, folder: &RunFolder) -> io::Result<()> {
        let text = printable::json(serde_json::to_string_pretty(self)?) + "\n";
        let mut new = folder.create_atomic(MANIFEST_FILE)?;
        new.file().write_all(text.as_bytes())?;
        new.commit()
    }

    /// Adds the processes that reported themselves, in the folder of a launcher that could not collect the reports.
    pub(super) fn add_reports(&mut self, reports: Vec<Unrecorded>) {
        self.unrecordable.extend(reports.into_iter().map(UnrecordableProcess::from_report));
    }

    /// Compares the traces in the folder with what the launcher wrote: a program, or whoever has copied the folder, may
    /// have removed or cut them.
    pub fn check_traces(&mut self, folder: &RunFolder) {
        self.changed_traces = self.processes.iter().filter_map(|process| process.changed_trace(folder)).collect();
    }

    /// The sentence about a run that has no end. `None` if it has one.
    pub fn without_end(&self) -> Option<&'static str> {
        (self.state == Some(RunState::Running)).then_some("memtrace was killed, or is still recording")
    }

    /// The processes of the command that are known not to be recorded. Empty if nothing is known to be missing.
    pub fn not_recorded(&self) -> Vec<NotRecorded> {
        let mut all = Vec::new();
        let mut add = |is_loss, text| all.push(NotRecorded { is_loss, text });
        if let Some(attached) = &self.attached {
            add(false, attached.limits());
        }
        for text in &self.changed_traces {
            add(true, text.clone());
        }
        for (reason, count) in &self.refused {
            let requests = if *count == 1 { "request" } else { "requests" };
            add(true, format!("memtrace refused {count} recording {requests}: {reason}"));
        }
        let mut groups: BTreeMap<(bool, &str), Vec<String>> = BTreeMap::new();
        // A helper such as ldconfig loads no library, so no CUDA either.
        let is_helper = |process: &&UnrecordableProcess| !process.uses_cuda && process.reason == STATICALLY_LINKED;
        for process in self.unrecordable.iter().filter(|process| !is_helper(process)) {
            let program = process.program.rsplit('/').next().filter(|name| !name.is_empty()).unwrap_or("a process");
            let group = groups.entry((!process.uses_cuda, &process.reason)).or_default();
            group.push(format!("{program} ({})", process.pid));
        }
        for ((without_cuda, reason), names) in groups {
            const SHOWN: usize = 3;
            let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
            let more = names.len().saturating_sub(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let cuda = if without_cuda { " (no CUDA seen)" } else { "" };
            add(!without_cuda, format!("memtrace could not record {shown}{more}{cuda}: {reason}"));
        }
        if self.unlisted > 0 {
            add(false, format!("memtrace could not record {} more processes", self.unlisted));
        }
        match self.unchecked {
            0 => {}
            1 => add(false, "1 program ended before memtrace could check whether it can record it".to_owned()),
            count => {
                let text = format!("{count} programs ended before memtrace could check whether it can record them");
                add(false, text);
            }
        }
        all
    }

    /// The number of processes that used CUDA and were not recorded, as far as it is known.
    pub fn unrecorded_processes(&self) -> u64 {
        let refused = self.refused.values().fold(0u64, |sum, count| sum.saturating_add(*count));
        let refused = refused.saturating_add(self.changed_traces.len() as u64);
        refused.saturating_add(self.unrecordable.iter().filter(|process| process.uses_cuda).count() as u64)
    }

    /// The entry of the process with this id.
    pub fn process(&self, pid: u32) -> Option<&ManifestProcess> {
        self.processes.iter().find(|p| p.pid == pid)
    }
}

/// A manifest whose processes are found by their ids. A run can have tens of thousands of processes.
pub(super) struct ManifestIndex<'a> {
    pub(super) manifest: &'a Manifest,
    by_pid: HashMap<u32, &'a ManifestProcess>,
}

impl<'a> ManifestIndex<'a> {
    pub(super) fn of(manifest: &'a Manifest) -> ManifestIndex<'a> {
        // Of several entries with the same id, the first one counts, as in `Manifest::process`.
        let by_pid = manifest.processes.iter().rev().map(|process| (process.pid, process)).collect();
        ManifestIndex { manifest, by_pid }
    }

    /// The entry of the process with this id.
    pub(super) fn process(&self, pid: u32) -> Option<&'a ManifestProcess> {
        self.by_pid.get(&pid).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_have_texts() {
        let texts = [0, 0x0300, 9, 40].map(|status| Exit::from_wait_status(status).text().unwrap());
        assert_eq!(texts, ["finished", "exit status 3", "killed by SIGKILL", "killed by signal 40"]);
        assert_eq!(Exit::default().text(), None);
    }

    #[test]
    fn wait_statuses_are_decoded() {
        assert_eq!(Exit::from_wait_status(0), Exit { code: Some(0), signal: None });
        assert_eq!(Exit::from_wait_status(0x0100), Exit { code: Some(1), signal: None });
        assert_eq!(Exit::from_wait_status(9), Exit { code: None, signal: Some(9) });
        assert_eq!(Exit::from_wait_status(139), Exit { code: None, signal: Some(11) });
    }

    #[test]
    fn what_a_run_lacks_that_was_attached_is_listed() {
        let text = |ran_ns| {
            let attached = Some(AttachedRun { ran_ns, ..AttachedRun::default() });
            let [one] = &Manifest { attached, ..Manifest::default() }.not_recorded()[..] else { panic!("one") };
            assert!(!one.is_loss);
            one.text.split(':').next().unwrap().to_owned()
        };
        assert_eq!(text(None), "memtrace attached");
        assert_eq!(text(Some(90_000_000_000)), "memtrace attached 90 s after the start of the program");
        assert_eq!(text(Some(7_199_000_000_000)), "memtrace attached 119 min after the start of the program");
        assert_eq!(text(Some(7_200_000_000_000)), "memtrace attached 2 h after the start of the program");
    }

    #[test]
    fn what_is_not_recorded_is_listed_by_reason() {
        assert!(Manifest::default().not_recorded().is_empty());
        let process = |pid, uses_cuda| UnrecordableProcess {
            pid,
            program: "/bin/train".into(),
            reason: "a reason".into(),
            uses_cuda,
            lost_events: 0,
        };
        let helper = UnrecordableProcess { reason: STATICALLY_LINKED.to_owned(), ..process(6, false) };
        let manifest = Manifest {
            refused: BTreeMap::from([("too many".to_owned(), 2)]),
            unrecordable: (1..=5).map(|pid| process(pid, pid > 1)).chain([helper]).collect(),
            unchecked: 1,
            ..Manifest::default()
        };
        let all: Vec<(bool, String)> = manifest.not_recorded().into_iter().map(|n| (n.is_loss, n.text)).collect();
        let expected = [
            (true, "memtrace refused 2 recording requests: too many"),
            (true, "memtrace could not record train (2), train (3), train (4) and 1 more: a reason"),
            (false, "memtrace could not record train (1) (no CUDA seen): a reason"),
            (false, "1 program ended before memtrace could check whether it can record it"),
        ];
        assert_eq!(all, expected.map(|(is_loss, text)| (is_loss, text.to_owned())));
        assert_eq!(manifest.unrecorded_processes(), 6);
    }

    #[test]
    fn absent_and_unknown_fields_are_accepted() {
        let manifest: Manifest = serde_json::from_str(r#"{"command":["python","x.py"],"new":1}"#).unwrap();
        assert_eq!(manifest.command, ["python", "x.py"]);
        assert_eq!(manifest.exit.success(), None);
        assert_eq!(serde_json::from_str::<Manifest>("{}").unwrap(), Manifest::default());
    }
}
