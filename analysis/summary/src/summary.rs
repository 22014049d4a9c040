//! The structure of `summary.json`. `analysis/schema/summary.schema.json` describes it for other programs. Within a
//! major version, fields are never renamed or removed; new fields can appear.
//!
//! The doc comments of these types are the descriptions in the JSON Schema. Each names the unit, and says when the
//! field is absent.

use std::collections::BTreeMap;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::beside::ProcessBeside;
use crate::colocated::ColocationSummary;
use crate::conclusions::{AllocatorAdvice, OutsidePytorch, RecordingGap, VerdictSummary};
use crate::cuda_graphs::CudaGraphsSummary;
use crate::device_memory::{DeviceBreakdown, DeviceMemorySummary};
use crate::host_memory::HostMemorySummary;
pub use crate::issue_summary::{HolderSummary, IssueSummary, OomForecastSummary};
use crate::json_text::json_text;
use crate::launch::LaunchSummary;
pub use crate::memory_totals::Totals;
use crate::outside_allocation::OutsideAllocation;
pub use crate::owners::OwnerBytes;
use crate::pinned::PinnedLine;
use crate::pools::PoolSummary;
use crate::refused::RefusedRequestSummary;
use crate::released::ReleasedPart;
pub(crate) use crate::schema_text::schema_text;
use crate::server::ServerSummary;
use crate::step_estimate::StepEstimate;
use crate::xla::XlaSummary;
use memtrace_input::load::{Exit, SNAPSHOT_END_REASON, SimulatedGpus, UnrecordableProcess};
use memtrace_insight::passes::{Category, Phase};
use memtrace_insight::rules::{CategoryRuleId, PhaseRuleId, RuleId};
pub use memtrace_insight::suggestions::Cost;
pub use memtrace_insight::{FrameSummary, StackSummary};
use memtrace_trace::named;

/// The version of the structure: major.minor.
pub const SUMMARY_VERSION: &str = "2.15";

/// The report of a run. A field whose name ends in `_bytes` is in bytes. A field whose name ends in `_ns` is in
/// nanoseconds; points in time count from the Unix epoch.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Summary {
    /// The version of this structure: major.minor. A new major version renames or removes fields.
    pub version: String,
    /// The run: its command, its end and its duration.
    pub run: RunSummary,
    /// The verdict as sentences: how the run ended, what it used, and the reasons.
    pub verdict: VerdictSummary,
    /// The processes that recorded events. Processes with out-of-memory errors come first, then those with the highest
    /// peak of allocated bytes.
    pub processes: Vec<ProcessSummary>,
    /// All processes of the launch beside each other. Absent if only one process recorded events and it is no rank of a
    /// job of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch: Option<LaunchSummary>,
    /// The counts of everything that the recording lacks, by name, summed over all processes. Empty if nothing is
    /// missing.
    pub losses: BTreeMap<String, u64>,
    /// The libraries and executables whose code appears in native stacks. Empty without native stacks.
    pub native_objects: Vec<NativeObjectSummary>,
    /// Descriptions of the files that could not be read or written, and of recordings without an end.
    pub problems: Vec<String>,
    /// Processes of the command that could not be recorded, as far as they were found.
    pub unrecordable: Vec<UnrecordableProcess>,
    /// The processes of the command that are known not to be recorded: refused and unrecordable ones with the reasons.
    pub not_recorded: Vec<NotRecordedSummary>,
    /// Everything that the recording lacks or that limits what it shows, as reports list it.
    pub gaps: Vec<RecordingGap>,
    /// The names of the files that the report wrote into the run folder.
    pub files: Vec<String>,
    /// The programs that XLA compiled, as it described them. Absent unless the run was recorded with `--xla-dump`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xla: Option<XlaSummary>,
    /// The main memory of the run's processes, in samples of the launcher. Absent in a dry run, and without samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<HostMemorySummary>,
}

/// Something that is not in the recording.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NotRecordedSummary {
    /// Whether events are known or likely to be lost. `memtrace check` then fails.
    pub is_loss: bool,
    /// A sentence without a period.
    pub text: String,
}

/// A library or executable, and the symbols that were found for its code addresses.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NativeObjectSummary {
    /// The path from which the dynamic loader loaded the object.
    pub path: String,
    /// The GNU build id, in hexadecimal digits. Empty if the object has none.
    pub build_id: String,
    /// The number of code addresses of the object that appear in stacks.
    pub addresses: u64,
    /// The number of these addresses whose function is known.
    pub addresses_with_function: u64,
    /// The number of these addresses whose source line is known.
    pub addresses_with_line: u64,
    /// The path of the file with the symbols: the object itself or a debug file. Absent if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symbol_file: Option<String>,
    /// The reasons why symbols are missing, as text.
    pub notes: Vec<String>,
}

/// The run: its command, its end and its duration.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RunSummary {
    /// The path of the run folder, trace or snapshot that was read.
    pub path: String,
    /// The version of memtrace that recorded the run. Absent if memtrace did not record it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memtrace_version: Option<String>,
    /// The command and its arguments.
    pub command: Vec<String>,
    /// The exit status or signal of the command.
    pub exit: Exit,
    /// The end of the run as text, for example `finished` or `ended by an out-of-memory error at step 0, optimizer`.
    pub outcome: String,
    /// The start of the run, in nanoseconds since the Unix epoch. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_ns: Option<u64>,
    /// The duration of the run, in nanoseconds. Absent if the start or the end is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_ns: Option<u64>,
    /// The number of recorded events, summed over all processes.
    pub events: u64,
    /// The number of processes that used CUDA, or requested to be recorded, and were not, as far as it is known.
    pub unrecorded_processes: u64,
    /// The simulated GPUs of a dry run. Absent where the program ran on real ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulated: Option<SimulatedGpus>,
    /// How much memory of each GPU the processes saw, in bytes (`memtrace run --limit`). Absent without a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// The number of allocations under a limit that did not get the lock of the run in time, and were made all the
    /// same. Absent if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_lock_missed: Option<u64>,
}

/// A process that recorded events.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ProcessSummary {
    /// The process id.
    pub pid: u32,
    /// The process id of the parent. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ppid: Option<u32>,
    /// The rank in a distributed job. Absent outside a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The number of ranks of the distributed job. Absent outside a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world_size: Option<u32>,
    /// The host name. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The command line.
    pub argv: Vec<String>,
    /// The exit status or signal.
    pub exit: Exit,
    /// The reason why the recording ended, for example `exited`. Absent if the recording has no end, because memtrace
    /// was killed or is still recording.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recording_end_reason: Option<String>,
    /// The file name of the trace.
    pub trace: String,
    /// The file name of the snapshot for pytorch.org/memory_viz. Absent if none was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The number of recorded events.
    pub events: u64,
    /// The events that rotation has dropped (`memtrace run --keep`). All figures are those of the kept events and of
    /// what was in use before them. Absent if all events were kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped: Option<DroppedEvents>,
    /// The devices on which the process allocated memory. Devices with out-of-memory errors come first, then those with
    /// the highest peak of allocated bytes.
    pub devices: Vec<DeviceSummary>,
    /// Requests for memory that CUDA refused to other callers than PyTorch's caching allocator, and that did not
    /// succeed later. One that ended the process comes first, then the largest. PyTorch's own errors are in
    /// `devices[].ooms`.
    pub refused_requests: Vec<RefusedRequestSummary>,
    /// The number of refused requests of further places, which `refused_requests` lacks.
    pub refused_requests_left_out: u64,
    /// The issues that were detected, by `bytes` in descending order.
    pub issues: Vec<IssueSummary>,
    /// The meaning of the out-of-memory error that ended the process, if no diagnostic rule matched. Absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_issue_remark: Option<String>,
    /// The pinned (page-locked) host memory, by the library that allocated it, by peak in descending order.
    pub pinned_host_memory: Vec<OwnerSummary>,
    /// The lines of pinned host memory at its peak, most bytes first. At most 20.
    pub pinned_host_lines: Vec<PinnedLine>,
    /// The counts of everything that the recording of this process lacks, by name. Empty if nothing is missing.
    pub losses: BTreeMap<String, u64>,
    /// The parts of the recorder that were verified or switched off, and remarks of the recorder.
    pub notices: Vec<NoticeSummary>,
}

/// The events that a recording has dropped (`memtrace run --keep`).
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DroppedEvents {
    /// The number of dropped events.
    pub events: u64,
    /// How long the kept events take, in nanoseconds.
    pub kept_ns: u64,
    /// How long the recording took until the last event, in nanoseconds.
    pub recorded_ns: u64,
    /// The same in one sentence.
    pub text: String,
}

/// The holders of the tensors of a device (`--holders`), at the scan after the explained out-of-memory error, or else
/// at the last one with most of the memory.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HoldersSummary {
    /// The scan.
    pub scan: ScanSummary,
    /// The bytes of all tensors that a Python path held.
    pub held_bytes: u64,
    /// The largest, by bytes in descending order.
    pub largest: Vec<HolderSummary>,
    /// The number of further patterns that `largest` leaves out.
    pub left_out: u64,
}

/// A scan of the program's objects.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ScanSummary {
    /// The occasion: `running`, `out_of_memory` or `end`.
    pub occasion: String,
    /// The number of the last event before it.
    pub event: u64,
    /// The number of objects visited.
    pub objects: u64,
    /// Whether objects were left out because there are too many.
    pub is_partial: bool,
}

/// A notice of the recorder.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NoticeSummary {
    /// The part of the recorder, for example `torch.tracker`.
    pub topic: String,
    /// The notice itself.
    pub text: String,
    /// The status of that part: `works` (verified), `off` (the text has the reason) or `remark`.
    pub status: String,
}

/// A device of one process.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DeviceSummary {
    /// The device ordinal; -1 is the CPU.
    pub device: i16,
    /// The name of the device. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The total memory of the device, in bytes. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// The bytes in use on the device before this process first allocated there: its CUDA context and other processes.
    /// Absent if they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_use_before_bytes: Option<u64>,
    /// The source of the block events: `torch` (the tracker of PyTorch's caching allocator), `torch_reporter` (the
    /// profiler's memory reporter), `cuda_calls` or `torch_cpu`.
    pub source: String,
    /// The maximum of each total over the whole recording. The maxima can belong to different points in time.
    pub highest: Totals,
    /// The values that `torch.cuda.memory_stats` would return at the end, by its keys, such as
    /// `allocated_bytes.all.peak`. Blocks that were allocated before the recording count as allocated. Empty if
    /// PyTorch's caching allocator was not recorded.
    pub statistics: BTreeMap<String, u64>,
    /// The memory state at the peak of allocated bytes. Absent if nothing was allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak: Option<MemoryState>,
    /// The memory state at the end of the recording. Absent if nothing was allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<MemoryState>,
    /// The division of the reserved memory at the explained out-of-memory error, or else at the peak. Absent if nearly
    /// all reserved memory was in use, or if PyTorch's caching allocator was not recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<ReservedSummary>,
    /// The engine that serves models: its weights, KV cache and stages. Absent for other programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<ServerSummary>,
    /// The activities of a job that serves a model and trains one on this device. Absent for other programs, and in the
    /// trainer's process if the engine has another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub colocation: Option<ColocationSummary>,
    /// The growth of the peak after the first step, caused by optimizer state. Absent if optimizer state explains less
    /// than half of the growth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub growth_after_first_step: Option<GrowthAfterFirstStep>,
    /// The place that requests far more in the explained step (of the error, else of the peak) than in other steps.
    /// Absent if there is none, or if it holds little.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outlier_step: Option<OutlierStep>,
    /// The inputs of the step with the peak, or of the step that the explained out-of-memory error ended. Absent unless
    /// they are clearly larger than those of other steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub larger_inputs: Option<LargerInputs>,
    /// Changes that would lower the peak, or the memory in use at the explained out-of-memory error: the cheapest
    /// first, combinations last.
    pub suggestions: Vec<SuggestionSummary>,
    /// The results of other settings of PyTorch's allocator. Absent if the allocator's policy was not replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub what_if: Option<WhatIfSummary>,
    /// The number of steps.
    pub steps: u32,
    /// The phases before the first step, in the order in which they occur.
    pub before_first_step: Vec<PhaseSummary>,
    /// The phases of the first step (step 0), in the order in which they occur. Counts and bytes are sums over its
    /// micro-batches.
    pub first_step: Vec<PhaseSummary>,
    /// The number of micro-batches of the first step: forward and backward passes between which no optimizer steps. 0
    /// if it is unknown.
    pub first_step_micro_batches: u64,
    /// The phases of all later steps, in the order in which they occur in a step. Counts and bytes are sums over the
    /// `steps` of each phase, `peak_bytes` is the maximum, and `after_bytes` belongs to the last of these steps.
    pub later_steps: Vec<PhaseSummary>,
    /// The number of steps after the first.
    pub later_steps_count: u32,
    /// The number of micro-batches of all steps after the first. 0 if it is unknown.
    pub later_steps_micro_batches: u64,
    /// The bytes of blocks that were freed after the last allocation while no Python frame was running: the teardown of
    /// the process. No phase counts them.
    pub freed_at_exit_bytes: u64,
    /// A step after the first that stands for most: it has the phases that most of these steps have, and the median of
    /// their peaks. Steps that an error interrupted do not count. Absent if there is none. A long run is represented by
    /// an even sample of its steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub typical_step: Option<StepSummary>,
    /// Single steps: the first ones, the last ones and the one with the peak.
    pub by_step: Vec<StepSummary>,
    /// The named ranges of the program (`record_function` and NVTX), by name, in the order of their first use.
    pub labels: Vec<LabelSummary>,
    /// The number of further ranges that `labels` leaves out.
    pub labels_left_out: u64,
    /// The functions of the program that are called again and again. Absent without them, and in training, unless
    /// functions that train and functions that only compute take turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub called_functions: Option<CalledFunctionsSummary>,
    /// The ranges of the name that was requested (`memtrace report --range NAME`). Absent without this option, or if
    /// the program had no range of this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<RangeSummary>,
    /// The memory that stayed on the device after the program had released memory: after the calls of
    /// `torch.cuda.empty_cache`, after ranges with `sleep`, `offload` or `unload` in their names, and after the
    /// requested point (`--released-after`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub released: Vec<ReleasedSummary>,
    /// The number of out-of-memory errors.
    pub oom_count: u64,
    /// The first 16 out-of-memory errors, and the last one.
    pub ooms: Vec<OomSummary>,
    /// The index in `ooms` of the explained error: the one that ended the process, or else the first. Absent without
    /// errors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explained_oom: Option<usize>,
    /// The device memory of this process, by the library that allocated it from CUDA, by peak in descending order.
    pub owners: Vec<OwnerSummary>,
    /// The part of it that is outside PyTorch's caching allocator. Absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outside_pytorch: Option<OutsidePytorch>,
    /// The memory pools of JAX and CuPy. Absent if neither allocated memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<PoolSummary>,
    /// The device memory of other processes that this process opened (CUDA IPC), by the library that opened it. No
    /// other figure includes it: it counts for the process that allocated it.
    pub imported: Vec<OwnerSummary>,
    /// The whole memory of the device, as `nvidia-smi` shows it, and what uses it. Absent if the recording has no
    /// readings of it, as PyTorch's snapshots and traces before 1.4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_memory: Option<DeviceMemorySummary>,
    /// The memory of PyTorch's segments that a library had unmapped. Absent if it unmapped none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unmapped_segments: Option<UnmappedSegmentsSummary>,
    /// The CUDA graphs and the private memory pools. Absent without any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_graphs: Option<CudaGraphsSummary>,
    /// The Python paths that held the largest tensors. Absent without `--holders`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub holders: Option<HoldersSummary>,
    /// The rules that classified allocations by phase, by bytes in descending order.
    pub phase_rules: Vec<PhaseRuleSummary>,
    /// The rules that classified blocks by category, by bytes in descending order.
    pub category_rules: Vec<CategoryRuleSummary>,
    /// The rules of `--categories FILE`, in the order of the file, with the blocks of the whole recording that each
    /// decided. The last entry has the blocks that no rule matches. Absent without a file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub custom_category_rules: Vec<CustomCategoryAmount>,
}

/// Segments of PyTorch's caching allocator whose memory a library unmapped, and may have mapped again: a model that was
/// paused or put to sleep. Such segments count as reserved, and their blocks as allocated, but the device has the
/// memory.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct UnmappedSegmentsSummary {
    /// The highest number of bytes without device memory at one time.
    pub peak_bytes: u64,
    /// The bytes without device memory at the end.
    pub end_bytes: u64,
    /// How often all segments had device memory and then some had none.
    pub times: u64,
    /// The libraries that unmapped the memory.
    pub unmapped_by: Vec<String>,
}

/// The memory of a device at one point in time, and the blocks that were allocated then.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MemoryState {
    /// The time, in nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// The event number: the position of the event in the order of all events of the process.
    pub seq: u64,
    /// The step, counted from 0. Absent before the first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// The phase.
    pub phase: Phase,
    /// The call stack of the allocation that reached this state. Only for the peak.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated_at: Option<StackSummary>,
    /// The totals.
    pub totals: Totals,
    /// The allocated blocks, by category. The bytes add up to `totals.allocated_bytes`, less the bytes for which no
    /// event was recorded.
    pub by_category: Vec<CategoryAmount>,
    /// The allocated blocks, by custom category (`--categories FILE`), in the order of the file. The sum is that of
    /// `by_category`. Absent without a file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_custom_category: Vec<CustomCategoryAmount>,
    /// The allocated blocks, by compile context (compiled region of `torch.compile`). The sum is that of `by_category`.
    /// Absent without compile contexts, which only snapshots of PyTorch have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_compile_context: Vec<CompileContextAmount>,
    /// The part of a KV cache that grows with each call of the model. Absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growing_kv_cache: Option<GrowingKvCache>,
    /// The allocated blocks, by the phase that allocated them. The sum is that of `by_category`.
    pub by_phase: Vec<PhaseAmount>,
    /// The largest groups of allocated blocks, by bytes in descending order. The blocks of a group have the same call
    /// stack, autograd node, phase and category.
    pub largest_allocations: Vec<AllocationGroup>,
    /// The allocated blocks, by `nn.Module`: a tree in which each module comes before its children. Only for the peak.
    /// Empty if no calls of modules were recorded. Small modules are left out; their bytes count for their parents.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_module: Vec<ModuleSummary>,
    /// The allocated blocks, by module or by group of modules of one class, as the report lists them. Each block counts
    /// once. Only for the peak. By bytes in descending order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub module_groups: Vec<ModuleGroupSummary>,
    /// The groups of modules of one class that have activations. Modules under activation checkpointing are left out.
    /// Groups can overlap: the modules of one can be inside the modules of another. Only for the peak.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repeated_modules: Vec<RepeatedModulesSummary>,
}

/// The memory of a module, or of modules of one class whose paths differ only in numbers.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ModuleGroupSummary {
    /// The path as in `by_module`, or for several modules the pattern of their paths: `blocks.*`.
    pub pattern: String,
    /// The class. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// The number of modules that the program has, with and without memory at this point in time.
    pub modules: usize,
    /// Whether this is only the memory of the module itself, because the modules inside it are listed separately.
    pub is_own: bool,
    /// The bytes.
    pub bytes: u64,
}

/// The memory of an `nn.Module`: blocks that its call or the autograd nodes of its call allocated, and its parameters
/// with their gradients and optimizer state.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ModuleSummary {
    /// The path as in `named_modules()`, or the classes of the calls that lead to the module. Empty for a module that
    /// no other module called.
    pub path: String,
    /// The class. Absent for a module that is never called and holds nothing itself, such as a `ModuleList`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// The number of levels below a module that no other module called.
    pub depth: usize,
    /// The bytes of the module and of the modules inside it.
    pub bytes: u64,
    /// The bytes of the module without the modules inside it.
    pub own_bytes: u64,
    /// The blocks of the module and of the modules inside it, by category. The bytes add up to `bytes`.
    pub by_category: Vec<CategoryAmount>,
}

/// Modules of one class, for example `blocks.0` to `blocks.11`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RepeatedModulesSummary {
    /// The path that all of them share, for example `blocks`. Empty if they share none.
    pub path: String,
    /// The patterns that cover all of them, for example `blocks.*`. `*` stands for numbers.
    pub patterns: Vec<String>,
    /// Their class.
    pub class: String,
    /// The number of modules that have activations at this point in time.
    pub count: usize,
    /// The number of all modules of the group that the program has.
    pub total: usize,
    /// Whether no other module was ever called inside any of them, as in a `Linear`.
    pub is_leaf: bool,
    /// The bytes of the activations of all of them.
    pub activation_bytes: u64,
    /// The maximum number of bytes that activation checkpointing of each module would free at this point in time. It is
    /// `activation_bytes` without two parts: the outputs that each module passes to the next, where the recording shows
    /// them, and the activations of the module whose backward pass is running. The peak can then be at another point in
    /// time; `suggestions` takes that into account.
    pub checkpointing_saves_at_most_bytes: u64,
}

/// The blocks of one category.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CategoryAmount {
    /// The category.
    pub category: Category,
    /// The bytes of the blocks.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// The blocks of one custom category.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CustomCategoryAmount {
    /// The name of the category. Absent for the blocks that no rule matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_category: Option<String>,
    /// The bytes of the blocks.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// The blocks that one compiled region of `torch.compile` allocated.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CompileContextAmount {
    /// The compile context as PyTorch wrote it, for example `Torch-Compiled Region: 0/0`. Absent for the blocks that no
    /// compiled region allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compile_context: Option<String>,
    /// The bytes of the blocks.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// The blocks that one phase allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PhaseAmount {
    /// The phase.
    pub phase: Phase,
    /// The bytes of the blocks.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// Allocated blocks with the same call stack, autograd node, phase, category, custom category and compile context.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct AllocationGroup {
    /// The bytes of the blocks.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The share of all allocated bytes, from 0 to 1.
    pub share: f64,
    /// The category of the blocks.
    pub category: Category,
    /// The custom category of the blocks. Absent without `--categories FILE`, and if no rule matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_category: Option<String>,
    /// The private memory pool of the blocks, as PyTorch's `MempoolId_t`, for example `(0, 1)`. Only for the categories
    /// `memory_pool` and `graph_pool`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_pool: Option<String>,
    /// The compiled region of `torch.compile` that allocated the blocks. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compile_context: Option<String>,
    /// The phase that allocated the blocks.
    pub phase: Phase,
    /// The call stack that allocated the blocks.
    pub stack: StackSummary,
    /// The name of the tensor in the largest of the blocks. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor_name: Option<String>,
    /// The data type and shape of that tensor, for example `float32[768, 3072]`. Absent if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_shape: Option<String>,
    /// The common pattern of the tensor names of all blocks, with `*` for the parts that differ, for example
    /// `Adam.exp_avg of *.weight`. Absent unless every block has a name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_name_pattern: Option<String>,
    /// The data type and shape of all these tensors, if it is the same. Absent without `tensor_name_pattern`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub common_tensor_shape: Option<String>,
}

/// The division of reserved memory at one point in time. The reserved bytes are the sum of `allocated_bytes`,
/// `pending_free_bytes`, `releasable_bytes` and `blocked_bytes`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ReservedSummary {
    /// The bytes of blocks in use by the program, rounded as the allocator rounds.
    pub allocated_bytes: u64,
    /// The part of `allocated_bytes` that is rounding and was not requested.
    pub rounding_bytes: u64,
    /// The bytes of blocks that the program freed and that streams still use.
    pub pending_free_bytes: u64,
    /// The free bytes that the allocator can release to CUDA: unused segments, and unused pages of expandable segments.
    pub releasable_bytes: u64,
    /// The free bytes that the allocator cannot release, because blocks in use are in the same segment or page.
    pub blocked_bytes: u64,
    /// The bytes of the largest free block.
    pub largest_free_bytes: u64,
    /// The number of segments.
    pub segments: u64,
    /// The number of segments that contain both blocks in use and blocked bytes.
    pub blocked_segments: u64,
    /// The groups of blocks that block segments alone, by `free_bytes` in descending order.
    pub blocked_by: Vec<BlockingAllocation>,
}

/// Blocks in use with the same call stack, and the segments that contain no other blocks in use.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct BlockingAllocation {
    /// The number of segments.
    pub segments: u64,
    /// The bytes of these segments.
    pub segment_bytes: u64,
    /// The number of blocks in use.
    pub blocks: u64,
    /// The bytes of the blocks in use.
    pub block_bytes: u64,
    /// The free bytes in these segments, which the allocator cannot release.
    pub free_bytes: u64,
    /// The call stack that allocated the blocks.
    pub allocated_at: StackSummary,
    /// The name of the tensor in the largest of the blocks. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor_name: Option<String>,
}

/// A place that requests far more in one step than in others. Its inputs can be as large as ever: a long list of boxes
/// is a small tensor.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OutlierStep {
    /// The step, counted from 0.
    pub step: u32,
    /// The one of these places that holds most.
    pub place: StackSummary,
    /// The largest request there in this step, in bytes.
    pub bytes: u64,
    /// The largest request there in all other steps, in bytes.
    pub other_steps_bytes: u64,
    /// The bytes in use that all such places of the step hold.
    pub held_bytes: u64,
    /// The facts as text.
    pub text: String,
}

/// The growth of the peak after the first step. An optimizer allocates its state at the end of the first step, so the
/// forward and backward passes of later steps run beside that state.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GrowthAfterFirstStep {
    /// The peak of allocated bytes in the first step.
    pub first_step_peak_bytes: u64,
    /// The highest peak of allocated bytes in later steps.
    pub later_steps_peak_bytes: u64,
    /// The bytes of the optimizer state that was allocated in the first step.
    pub optimizer_state_bytes: u64,
    /// By category, the bytes at the later steps' peak minus those at the peak of the same phase in the first step.
    /// Empty if the blocks at one of these peaks are unknown.
    #[serde(default)]
    pub by_category: Vec<CategoryDifference>,
    /// The sentence about it.
    pub text: String,
}

/// The bytes of one category at one point in time minus those at another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CategoryDifference {
    /// The category.
    pub category: Category,
    /// The difference in bytes.
    pub bytes: i64,
}

/// The part of a KV cache that grows by the same size with each call of the model. A recording has sizes, and no
/// shapes: it does not show for how many sequences.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GrowingKvCache {
    /// The number of blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// By how many bytes each call of the model that adds a token grows them together. Caches of earlier requests that
    /// the program keeps do not grow.
    pub growth_bytes: u64,
    /// The caches of each model, if several models have one, most bytes first. Absent otherwise.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub by_model: Vec<ModelKvCache>,
    /// The sentence about it.
    pub text: String,
}

/// The part of the KV cache that one model computes, such as the draft model of speculative decoding.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ModelKvCache {
    /// The class of the model; numbered in the order of first calls if several have the same.
    pub model: String,
    /// The number of blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// By how many bytes each call of the model that adds tokens grows them together.
    pub growth_bytes: u64,
}

/// The inputs of a step beside those of the others. A recording has sizes of inputs, and no shapes.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LargerInputs {
    /// The step.
    pub step: u32,
    /// The requested bytes of the inputs that the step allocated.
    pub input_bytes: u64,
    /// The median of the other steps that allocated inputs.
    pub median_input_bytes: u64,
    /// With `--holders`: the Python paths that held the inputs at the error, with their data types and shapes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<HolderSummary>,
}

named! {
    serde
    /// The part of a program that the figures of a suggestion cover.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
    pub enum SuggestionScope {
        /// The whole run. If an out-of-memory error ended it, the interrupted step is completed as an earlier step did
        /// it.
        #[default]
        Run => "run",
        /// The run up to the end of the iteration that an out-of-memory error interrupted, completed as an earlier one.
        Iteration => "iteration",
        /// The run up to the out-of-memory error. Later events are unknown.
        UntilError => "until_error",
    }
}

/// A change that would lower the memory in use at the peak or at an out-of-memory error.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SuggestionSummary {
    /// The rule that makes the suggestion.
    pub rule: RuleId,
    /// The change to the program.
    pub action: String,
    /// The rules of the changes that are made together. Absent for a single change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub combines: Vec<RuleId>,
    /// The peak of allocated bytes with the change, computed by a replay of the recorded blocks.
    pub peak_after_bytes: u64,
    /// The peak of reserved bytes with the change.
    pub reserved_after_bytes: u64,
    /// The number of bytes by which the change lowers the peak of allocated bytes.
    pub saves_bytes: u64,
    /// Whether the allocator would have had memory for every request. Absent if this is unknown: the device's memory is
    /// unknown, or `scope` is not the whole run and this part fits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
    /// The part of the program that the figures cover.
    pub scope: SuggestionScope,
    /// Whether `peak_after_bytes` is an upper bound, because the run does not show the exact value. Absent if it is
    /// not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_most: bool,
    /// The cost of the change beside memory.
    pub cost: Cost,
    /// The cost in words.
    pub cost_text: String,
    /// Lines of Python that make the change in this program.
    pub code: Vec<String>,
    /// A page about the change; empty for none.
    pub link: String,
    /// The condition of the rule, and the figures of this run.
    pub evidence: String,
    /// The change that the replay makes, as text.
    pub method: String,
}

/// The results of other settings of PyTorch's caching allocator, by a replay of its policy.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct WhatIfSummary {
    /// The number of blocks that the replay with the run's own settings placed at the recorded address.
    pub matched_blocks: u64,
    /// The number of segment events that the replay with the run's own settings reproduced one for one.
    pub matched_segment_events: u64,
    /// The first difference between the replay and the recording, as text. Absent if there is none. With a difference,
    /// `settings` is empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<String>,
    /// The bytes that the allocator could have had. The rest of the device is in use as recorded. Absent if it is
    /// unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// The peak of reserved bytes with the run's own settings.
    pub reserved_peak_bytes: u64,
    /// The results of other settings.
    pub settings: Vec<ReplayedSetting>,
    /// The best of the settings. Absent if no setting is worth a remark.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<AllocatorAdvice>,
}

/// The result of one setting of PyTorch's caching allocator.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ReplayedSetting {
    /// The setting in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.
    pub setting: String,
    /// Whether the failed request would have succeeded. Absent if no request failed, or if the replay cannot decide it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
    /// Whether an earlier request would have failed.
    pub fails_earlier: bool,
    /// The peak of reserved bytes, up to the out-of-memory error if there was one.
    pub reserved_peak_bytes: u64,
    /// Whether the rest of the interrupted step would have succeeded as well. Absent if the failed request does not
    /// fit, or if the recording does not show the rest of the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_fits: Option<bool>,
    /// The bytes that the device lacks for the rest of the step. Absent if the step fits, or if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_short_bytes: Option<u64>,
    /// The peak of reserved bytes with the rest of the step. Absent unless it fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_reserved_peak_bytes: Option<u64>,
}

/// The allocations and frees of one phase.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PhaseSummary {
    /// The phase.
    pub phase: Phase,
    /// The number of steps in which the phase allocated or freed something; 1 before the first step.
    pub steps: u32,
    /// The number of blocks that were allocated.
    pub allocations: u64,
    /// The bytes of the blocks that were allocated.
    pub allocated_bytes: u64,
    /// The number of blocks that were freed.
    pub frees: u64,
    /// The bytes of the blocks that were freed.
    pub freed_bytes: u64,
    /// The change of allocated bytes: `allocated_bytes` minus `freed_bytes`.
    pub net_bytes: i64,
    /// The number of allocated bytes of the device before the phase. Of several steps, before the first.
    #[serde(default)]
    pub start_bytes: u64,
    /// The highest number of allocated bytes of the device during the phase.
    pub peak_bytes: u64,
    /// The number of allocated bytes of the device at the end of the phase.
    pub after_bytes: u64,
    /// The blocks that the phase allocated and that outlived it, by category, by bytes in descending order.
    pub kept: Vec<KeptCategory>,
    /// The blocks that the phase freed and that had outlived the phase that allocated them, by category, by bytes in
    /// descending order.
    pub freed_of_other_phases: Vec<CategoryAmount>,
    /// The explanation of `net_bytes` as text. Empty if there is none.
    pub explanation: String,
}

/// The memory of a device in all ranges of the requested name, on all threads.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RangeSummary {
    /// Allocated bytes at the start of the first range.
    pub start_bytes: u64,
    /// Allocated bytes at the end of the last range, or at the end of the recording if a range is still open.
    pub end_bytes: u64,
    /// The memory state when the most bytes were allocated inside. Blocks that were allocated before the range count.
    pub peak: MemoryState,
}

/// The memory that stayed on a device after a point of the program. Of all times that the program came there, it is the
/// one after which the most bytes stayed.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ReleasedSummary {
    /// The point: `range:NAME`, `function:NAME` or `line:FILE:LINE`.
    pub after: String,
    /// How often the program came to the point.
    pub times: u64,
    /// The bytes that this process had on the device when the range or the call began, as `stayed_bytes` counts them.
    pub start_bytes: u64,
    /// The bytes that this process still had on the device: what it has allocated from CUDA. The CUDA context and
    /// kernels do not count.
    pub stayed_bytes: u64,
    /// The owners of these bytes, most bytes first. The bytes of the parts add up to `stayed_bytes`.
    pub parts: Vec<ReleasedPart>,
    /// The blocks that were allocated.
    pub state: MemoryState,
    /// The division of the memory that PyTorch's allocator held outside private pools.
    pub reserved: ReservedSummary,
    /// The Python objects that held the blocks at the next scan (`memtrace --holders`), most bytes first. Blocks that
    /// were freed before the scan are left out. Empty without scans.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held_by: Vec<HolderSummary>,
    /// The whole memory of the device, with the CUDA context. Absent without readings of the memory in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory: Option<DeviceBreakdown>,
}

/// The allocations and frees inside the ranges of one name (`torch.profiler.record_function` or NVTX), on all threads.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LabelSummary {
    /// The name of the ranges. A trailing `*` stands for the number in which several names differ.
    pub name: String,
    /// The API that the program used: `record_function`, `nvtx` or `annotate` (`gpu_memtrace.annotate`).
    pub api: String,
    /// The rule that identifies the ranges as PyTorch's own. Absent for ranges of the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<PhaseRuleId>,
    /// The number of ranges.
    pub times: u64,
    /// The number of blocks that were allocated inside.
    pub allocations: u64,
    /// The bytes of the blocks that were allocated inside.
    pub allocated_bytes: u64,
    /// The number of blocks that were freed inside.
    pub frees: u64,
    /// The bytes of the blocks that were freed inside.
    pub freed_bytes: u64,
    /// The bytes of the blocks that were allocated inside a range and still allocated at its end.
    pub kept_bytes: u64,
    /// The highest number of allocated bytes of the device inside a range.
    pub peak_bytes: u64,
    /// The number of allocated bytes of the device at the end of the last range.
    pub after_bytes: u64,
    /// The total duration of the ranges, in nanoseconds.
    pub duration_ns: u64,
}

/// The functions of the program that are called again and again.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CalledFunctionsSummary {
    /// The functions, most allocated bytes first.
    pub functions: Vec<CalledFunctionSummary>,
    /// The number of further functions.
    pub left_out: u64,
}

/// The calls of one function. They are found from the stacks of allocations and frees.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CalledFunctionSummary {
    /// The qualified name of the function.
    pub name: String,
    /// Where the function begins: the file and its first line, if it is known.
    pub location: String,
    /// The number of calls in which something was allocated.
    pub calls: u64,
    /// The number of blocks that were allocated inside.
    pub allocations: u64,
    /// The bytes of the blocks that were allocated inside.
    pub allocated_bytes: u64,
    /// The bytes of the blocks that were allocated inside a call and still allocated at its end.
    pub kept_bytes: u64,
    /// The highest number of allocated bytes of the device at an allocation inside.
    pub peak_bytes: u64,
}

/// The blocks of one category that outlived the phase that allocated them.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct KeptCategory {
    /// The category.
    pub category: Category,
    /// The bytes of the blocks, rounded as the allocator rounds.
    pub bytes: u64,
    /// The bytes that the program requested for the blocks.
    pub requested_bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The call stack that allocated most of these bytes. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_allocation: Option<KeptAllocation>,
}

/// Blocks with the same call stack that outlived the phase that allocated them.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct KeptAllocation {
    /// The bytes of the blocks.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The call stack that allocated the blocks.
    pub stack: StackSummary,
}

/// One step.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StepSummary {
    /// The number of the step, counted from 0.
    pub step: u32,
    /// The start of the step, in nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// The duration of the step, in nanoseconds.
    pub duration_ns: u64,
    /// The number of micro-batches. 0 if it is unknown.
    pub micro_batches: u64,
    /// The phases of the step, in the order in which they occur.
    pub phases: Vec<StepPhase>,
    /// The allocated bytes before, during and after the forward and backward passes of all micro-batches together.
    /// Absent without such a pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passes: Option<Levels>,
    /// The parts of the step in time order: phases, those that take turns together.
    #[serde(default)]
    pub joined_phases: Vec<JoinedPhasesSummary>,
}

/// A part of a step. The allocated bytes before and after it differ by what it changed.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct JoinedPhasesSummary {
    /// The phase, or the phases that take turns.
    pub phases: Vec<Phase>,
    /// The allocated bytes before the part.
    pub start_bytes: u64,
    /// The highest number of allocated bytes during the part.
    pub peak_bytes: u64,
    /// The allocated bytes after the last allocation or free of the part.
    pub end_bytes: u64,
    /// The change of allocated bytes by category as text. Empty if nothing changed, or if it is unknown what.
    pub explanation: String,
}

/// The allocated bytes of a device before, during and after a part of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Levels {
    /// The allocated bytes before the part.
    pub start_bytes: u64,
    /// The highest number of allocated bytes during the part.
    pub peak_bytes: u64,
    /// The allocated bytes after the last allocation or free of the part.
    pub end_bytes: u64,
}

/// One phase of one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StepPhase {
    /// The phase.
    pub phase: Phase,
    /// The number of blocks that were allocated.
    pub allocations: u64,
    /// The bytes of the blocks that were allocated.
    pub allocated_bytes: u64,
    /// The bytes of the blocks that were freed.
    pub freed_bytes: u64,
    /// The change of allocated bytes: `allocated_bytes` minus `freed_bytes`.
    pub net_bytes: i64,
    /// The number of allocated bytes of the device before the phase.
    #[serde(default)]
    pub start_bytes: u64,
    /// The highest number of allocated bytes of the device during the phase.
    pub peak_bytes: u64,
    /// The number of allocated bytes of the device after the last allocation or free of the phase.
    #[serde(default)]
    pub end_bytes: u64,
    /// How often another phase gave way to this one in the step.
    #[serde(default)]
    pub turns: u32,
}

/// An out-of-memory error: a request for memory that failed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct OomSummary {
    /// The size of the request in bytes, rounded as the allocator rounds.
    pub requested_bytes: u64,
    /// The call stack of the request.
    pub requested_at: StackSummary,
    /// The rule that classified the request by phase. `in_use.phase` is the phase.
    pub phase_rule: PhaseRuleId,
    /// The memory state when the request failed.
    pub in_use: MemoryState,
    /// The free bytes of the device, as CUDA reported them. Absent if they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_free_bytes: Option<u64>,
    /// The bytes that PyTorch had reserved and that were not allocated.
    pub reserved_but_unallocated_bytes: u64,
    /// The bytes of the largest free block of the caching allocator.
    pub largest_free_bytes: u64,
    /// The bytes that this process held outside PyTorch's caching allocator: the sum of `outside_pytorch`.
    pub outside_pytorch_bytes: u64,
    /// The memory that this process held outside PyTorch's caching allocator, by the library that allocated it from
    /// CUDA, by bytes in descending order.
    pub outside_pytorch: Vec<OwnerBytes>,
    /// The largest single allocation of `outside_pytorch`, such as the pool of another library. Absent if it is less
    /// than a tenth of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest_outside: Option<OutsideAllocation>,
    /// The other bytes in use on the device: CUDA contexts and other processes. With `device_free_bytes`,
    /// `held_back_bytes`, `outside_pytorch_bytes` and the reserved bytes, they add up to the device's `total_bytes`.
    /// Absent if they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contexts_and_other_processes_bytes: Option<u64>,
    /// The total of both, with the largest owners, as text. Absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outside_text: Option<String>,
    /// The memory of other recorded processes of the run on the device, most bytes first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes_beside: Vec<ProcessBeside>,
    /// The free bytes of the device that a limit keeps from this process: what the driver has free, minus
    /// `device_free_bytes`. A library that limits GPU memory, such as HAMi-core, shows the program a smaller device.
    /// Absent without such a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_back_bytes: Option<u64>,
    /// Whether PyTorch's own limit (`torch.cuda.set_per_process_memory_fraction`) refused the request although CUDA had
    /// the memory.
    pub refused_by_pytorch: bool,
    /// The bytes that PyTorch requests from CUDA for such a block, as its error message names them.
    pub segment_bytes: u64,
    /// The bytes that CUDA lacked: `segment_bytes` minus `device_free_bytes`. Absent if it is unknown, or not the
    /// reason of the failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub short_bytes: Option<u64>,
    /// The optimizer state that the request was for, for example `Adam.exp_avg_sq of 3.weight`. Absent unless tensor
    /// names and the order of allocations prove it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_for: Option<String>,
    /// The name of the only parameter or other named tensor that is as large as the request. Absent if there is none,
    /// or more than one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub as_large_as: Option<String>,
    /// The total bytes of optimizer state that the optimizer needs. Absent unless the request failed while the
    /// optimizer allocated its state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer_state_needed_bytes: Option<u64>,
    /// The memory that the interrupted step would still have needed. Absent if the recording does not show it, or if
    /// another error is explained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_estimate: Option<StepEstimate>,
    /// Whether the error ended the process. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fatal: Option<bool>,
}

/// Memory that one library allocated from CUDA.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OwnerSummary {
    /// The name of the owner, for example `PyTorch's caching allocator` or `NCCL`.
    pub owner: String,
    /// The path of the object that called CUDA. Absent for PyTorch's caching allocator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// The bytes at the end of the recording.
    pub end_bytes: u64,
    /// The highest number of bytes.
    pub peak_bytes: u64,
    /// The number of allocations.
    pub allocations: u64,
}

/// A rule that classified allocations by phase.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PhaseRuleSummary {
    /// The rule.
    pub rule: PhaseRuleId,
    /// The phase that the rule assigned.
    pub phase: Phase,
    /// A frame that the rule matched. Absent if the rule does not match frames.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<FrameSummary>,
    /// The number of allocations that the rule classified.
    pub allocations: u64,
    /// The bytes of these allocations.
    pub bytes: u64,
}

/// A rule that classified blocks by category.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CategoryRuleSummary {
    /// The rule.
    pub rule: CategoryRuleId,
    /// The category that the rule assigned.
    pub category: Category,
    /// A frame that the rule matched. Absent if the rule does not match frames.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<FrameSummary>,
    /// The number of blocks that the rule classified.
    pub blocks: u64,
    /// The bytes of these blocks.
    pub bytes: u64,
}

/// Losses that are events of the program which are missing from the traces.
const LOST_EVENTS: [&str; 6] =
    ["events_dropped", "events_lost", EVENTS_OF_UNRECORDED_PROCESSES, "reentered", "undecodable_events", "unwritten"];
/// The loss that counts the events of processes that could not be recorded, as far as these reported them.
pub(crate) const EVENTS_OF_UNRECORDED_PROCESSES: &str = "events_of_unrecorded_processes";

/// The number of events among these losses.
pub(crate) fn lost_events_of(losses: &BTreeMap<String, u64>) -> u64 {
    let counts = LOST_EVENTS.iter().filter_map(|name| losses.get(*name));
    counts.fold(0, |sum, count| sum.saturating_add(*count))
}

/// Why a file cannot be read as a summary.
#[derive(Debug)]
pub enum SummaryError {
    /// It is not JSON, or has other fields.
    Json(serde_json::Error),
    /// It is of this version, another major one.
    Version(String),
}

impl fmt::Display for SummaryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SummaryError::Json(e) => write!(f, "not a summary.json of memtrace: {e}"),
            SummaryError::Version(version) => {
                write!(f, "version {version} of summary.json is not supported by this version of memtrace")
            }
        }
    }
}

impl std::error::Error for SummaryError {}

/// The version of any `summary.json`.
#[derive(Deserialize)]
struct SummaryVersion {
    version: String,
}

impl ProcessSummary {
    /// The number of events of the process that are known to be missing.
    pub fn lost_events(&self) -> u64 {
        lost_events_of(&self.losses)
    }
}

impl DeviceSummary {
    /// The peak of allocated bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.peak.as_ref().map_or(0, |peak| peak.totals.allocated_bytes)
    }

    /// The engine that serves models, unless the process also trains: then it has steps, too.
    pub fn server_only(&self) -> Option<&ServerSummary> {
        self.server.as_ref().filter(|_| !self.trains())
    }

    /// Whether the process runs backward passes on the device.
    pub fn trains(&self) -> bool {
        let phases = [&self.before_first_step, &self.first_step, &self.later_steps];
        phases.into_iter().flatten().any(|row| row.phase == Phase::Backward)
    }

    /// The out-of-memory error that the report explains.
    pub fn explained_oom(&self) -> Option<&OomSummary> {
        self.explained_oom.and_then(|at| self.ooms.get(at))
    }
}

/// Whether every process is a PyTorch snapshot. A snapshot does not know how its program ended.
pub fn is_snapshot(processes: &[ProcessSummary]) -> bool {
    !processes.is_empty() && processes.iter().all(|p| p.recording_end_reason.as_deref() == Some(SNAPSHOT_END_REASON))
}

impl Summary {
    /// The number of events that are known to be missing.
    pub fn lost_events(&self) -> u64 {
        lost_events_of(&self.losses)
    }

    /// Whether something else than events is missing.
    pub fn has_other_losses(&self) -> bool {
        self.losses.iter().any(|(name, count)| *count > 0 && !LOST_EVENTS.contains(&name.as_str()))
    }

    /// The JSON Schema of `summary.json`, generated from these structures and their documentation.
    pub fn json_schema() -> String {
        schema_text::<Summary>()
    }

    /// Reads a `summary.json` of this major version. Fields that an older minor version lacks are absent, zero or
    /// empty; fields that a newer one adds are ignored.
    ///
    /// # Errors
    ///
    /// If it is no summary, of another major version, or has a name that this version does not know.
    pub fn from_json(json: &[u8]) -> Result<Summary, SummaryError> {
        let is_supported = |version: &str| version.split('.').next() == SUMMARY_VERSION.split('.').next();
        match serde_json::from_slice::<Summary>(json) {
            Ok(summary) if is_supported(&summary.version) => Ok(summary),
            Ok(summary) => Err(SummaryError::Version(summary.version)),
            Err(e) => Err(match serde_json::from_slice::<SummaryVersion>(json) {
                // Another major version has other structures.
                Ok(SummaryVersion { version }) if !is_supported(&version) => SummaryError::Version(version),
                _ => SummaryError::Json(e),
            }),
        }
    }

    /// The content of `summary.json`.
    pub fn to_json(&self) -> String {
        json_text(self) + "\n"
    }
}
