//! The structure of `summary.json`. `analysis/schema/summary.schema.json` describes it for other programs. Within a
//! major version, fields are never renamed or removed; new fields can appear.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use memtrace_input::load::Exit;
use memtrace_input::printable;
use memtrace_insight::passes::{Category, Phase};

/// The version of the structure: major.minor.
pub const SUMMARY_VERSION: &str = "1.4";

/// Everything a run's report says. Sizes in bytes, times in nanoseconds (of the epoch where they are moments).
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct Summary {
    /// The version of this structure.
    pub version: String,
    /// What ran.
    pub run: RunSummary,
    /// The processes that recorded anything: those that ran out of memory first, then by the share of their device they
    /// filled.
    pub processes: Vec<ProcessSummary>,
    /// What is missing in the recording, over all processes, by name; nothing when nothing is.
    pub losses: BTreeMap<String, u64>,
    /// The objects whose native code stacks name, and how much is known of it; absent without native stacks.
    pub native_objects: Vec<NativeObjectSummary>,
    /// What could not be read or written, in words.
    pub problems: Vec<String>,
    /// The files of the run folder, by name.
    pub files: Vec<String>,
}

/// How much is known of the native code of an object.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct NativeObjectSummary {
    /// The object, as the loader had it.
    pub path: String,
    /// Its GNU build id; empty where it has none.
    pub build_id: String,
    /// Places in its code that stacks name.
    pub places: u64,
    /// Those whose function is known.
    pub named: u64,
    /// Those whose line is known, too.
    pub with_line: u64,
    /// The file the names are from: the object or a debug file; absent when there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symbols_from: Option<String>,
    /// Why something is missing, in words.
    pub notes: Vec<String>,
}

/// A run.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct RunSummary {
    /// The run folder or trace.
    pub path: String,
    /// The version of memtrace that recorded it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memtrace: Option<String>,
    /// The command.
    pub command: Vec<String>,
    /// How it ended.
    pub exit: Exit,
    /// How it ended, in words.
    pub outcome: String,
    /// When it was started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_ns: Option<u64>,
    /// How long it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_ns: Option<u64>,
    /// Events recorded, over all processes.
    pub events: u64,
}

/// A process.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct ProcessSummary {
    /// Its id.
    pub pid: u32,
    /// Its parent's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ppid: Option<u32>,
    /// Its rank in a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The number of ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub world_size: Option<u32>,
    /// Its host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Its command line.
    pub argv: Vec<String>,
    /// How it ended.
    pub exit: Exit,
    /// Why its recording ended, in the recorder's words; absent when the recorder was cut off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recording_ended: Option<String>,
    /// The trace's file name.
    pub trace: String,
    /// The snapshot's file name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Events recorded.
    pub events: u64,
    /// Its devices: those that ran out of memory first, then by peak.
    pub devices: Vec<DeviceSummary>,
    /// What is wrong, largest first; empty when nothing is.
    pub findings: Vec<FindingSummary>,
    /// Page-locked host memory, by who holds it.
    pub pinned: Vec<OwnerSummary>,
    /// What is missing in its recording, by name.
    pub losses: BTreeMap<String, u64>,
    /// What parts of the recorder did or could not do.
    pub notices: Vec<NoticeSummary>,
}

/// Something wrong with the run.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct FindingSummary {
    /// The rule that says so; docs/reference/diagnostics.md explains each.
    pub rule: String,
    /// On which device; -1 is the CPU.
    pub device: i16,
    /// What it costs: bytes held that need not be.
    pub bytes: u64,
    /// What is wrong, in one line.
    pub headline: String,
    /// What that rests on.
    pub evidence: Vec<String>,
    /// The line to change, or whose allocations these are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub place: Option<StackSummary>,
    /// What to do about it.
    pub mend: String,
    /// Bytes by which the peak would be lower; absent where this run does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saves_bytes: Option<u64>,
    /// Files in the run's folder that show more, most telling first; of reference cycles their objects (`--cycles`).
    pub files: Vec<String>,
}

/// What a part of the recorder reported.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct NoticeSummary {
    /// Which part.
    pub topic: String,
    /// What about it.
    pub text: String,
    /// `works` (and was verified), `off` (the text says why), or `remark`.
    pub verdict: String,
}

/// One device of one process.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct DeviceSummary {
    /// Its ordinal; -1 is the CPU.
    pub device: i16,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// All of its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// What was in use before this process first allocated there: its CUDA context and other processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_before_bytes: Option<u64>,
    /// Whose events tell about its blocks: `torch`, `torch_reporter`, `cuda_calls` or `torch_cpu`.
    pub source: String,
    /// The highest totals, each at its own moment.
    pub highest: Totals,
    /// What `torch.cuda.memory_stats` would say at the end, by its keys, such as `allocated_bytes.all.peak`; what was there before
    /// the recording counts as allocated. Empty where PyTorch's caching allocator was not recorded.
    pub statistics: BTreeMap<String, u64>,
    /// The peak of allocated bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak: Option<MomentSummary>,
    /// The end of the recording.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<MomentSummary>,
    /// What the reserved memory was at the out-of-memory error that is explained, else at the peak; absent where there was nothing to
    /// explain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<ReservedSummary>,
    /// What the second step needs beyond the first; absent where it needs no more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub second_step: Option<SecondStepSummary>,
    /// What would lower the peak, or what was there at the error; most first.
    pub actions: Vec<ActionSummary>,
    /// What other settings of the allocator would have done; absent where it was not replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub what_if: Option<WhatIfSummary>,
    /// Steps found.
    pub steps: u32,
    /// The phases before the first step.
    pub before: Vec<PhaseSummary>,
    /// The phases of the first step.
    pub first_step: Vec<PhaseSummary>,
    /// The phases of all later steps, summed over [`Self::later_steps_count`] steps.
    pub later_steps: Vec<PhaseSummary>,
    /// How many later steps there are.
    pub later_steps_count: u32,
    /// What was freed after the last allocation, while no Python frame ran.
    pub freed_at_exit_bytes: u64,
    /// Step by step: the first and the last ones and the one with the peak.
    pub by_step: Vec<StepSummary>,
    /// What happened in the ranges that the program named, by name, in the order in which the names came up.
    pub labels: Vec<LabelSummary>,
    /// Further names.
    pub labels_left_out: u64,
    /// Out-of-memory errors there were.
    pub oom_count: u64,
    /// The first of them, and the last.
    pub ooms: Vec<OomSummary>,
    /// Which of [`Self::ooms`] is explained: the one that ended the process, else the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explained_oom: Option<usize>,
    /// The process's memory on this device, by who obtained it from CUDA.
    pub owners: Vec<OwnerSummary>,
    /// Memory of other processes on this device that this one opened, by who opened it. In no other figure: it is the other process's.
    pub imported: Vec<OwnerSummary>,
    /// Which rules gave the phases, most bytes first.
    pub reasons: Vec<ReasonSummary>,
    /// Which rules gave the categories, most bytes first.
    pub category_reasons: Vec<CategoryReasonSummary>,
}

/// Running totals, as `torch.cuda.memory_stats` counts them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct Totals {
    /// Blocks in use by the program.
    pub allocated_bytes: u64,
    /// The same and blocks that streams still use.
    pub active_bytes: u64,
    /// Segments.
    pub reserved_bytes: u64,
    /// What was asked for.
    pub requested_bytes: u64,
}

/// A moment and what was alive.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct MomentSummary {
    /// When.
    pub time_ns: u64,
    /// The place of its event in the recording.
    pub seq: u64,
    /// The step; absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// The phase.
    pub phase: Phase,
    /// Who made the allocation that reached it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<StackSummary>,
    /// The totals.
    pub totals: Totals,
    /// What was alive, by category.
    pub by_category: Vec<CategoryAmount>,
    /// What was alive, by the phase that had allocated it.
    pub by_phase: Vec<PhaseAmount>,
    /// The largest sources of what was alive.
    pub top: Vec<TopEntry>,
    /// What was alive, by `nn.Module`: a tree, each module before those in it. Only of the peak, and where calls of modules were
    /// recorded; modules with little of it are left out, what they have is in those that hold them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_module: Vec<ModuleSummary>,
    /// Modules of one class, side by side, that had activations then, those under activation checkpointing left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repeated_modules: Vec<RepeatedSummary>,
}

/// A module and what belongs to it: what was made in its call or by nodes that were, and its parameters with their gradients and
/// optimizer state.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct ModuleSummary {
    /// Its path as `named_modules()` gives it, or the classes by which it was called; empty for one that no module called.
    pub path: String,
    /// Its class; absent where it was never called itself, as a `ModuleList`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// How many levels it is below one that no module called.
    pub depth: usize,
    /// Bytes of it and of the modules in it.
    pub bytes: u64,
    /// Bytes of it alone.
    pub own_bytes: u64,
    /// Bytes of it and of the modules in it, by category.
    pub by_category: Vec<CategoryAmount>,
}

/// Modules of one class, side by side.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct RepeatedSummary {
    /// What holds them, e.g. `blocks`; empty for one that no module called.
    pub path: String,
    /// Their class.
    pub class: String,
    /// How many there are.
    pub count: usize,
    /// The activations of all of them.
    pub activation_bytes: u64,
    /// By how much activation checkpointing of each would lower this moment, at most: all of that but what each hands to the next, where
    /// the recording tells, and what the one has whose backward the moment is in. Another moment may then be the peak: see the actions.
    pub checkpointing_saves_at_most_bytes: u64,
}

/// Bytes of a category.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct CategoryAmount {
    /// Which.
    pub category: Category,
    /// Bytes.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
}

/// Bytes of a phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct PhaseAmount {
    /// Which.
    pub phase: Phase,
    /// Bytes.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
}

/// A source of live bytes.
#[derive(Clone, PartialEq, Debug, Serialize, JsonSchema)]
pub struct TopEntry {
    /// Bytes.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
    /// Its share of what was allocated, 0 to 1.
    pub share: f64,
    /// What they were for.
    pub category: Category,
    /// The phase that allocated them.
    pub phase: Phase,
    /// From where.
    pub stack: StackSummary,
    /// What the largest of the blocks is called, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the blocks are called together, where all have names: what differs between them is `*`, e.g. `Adam.exp_avg of *.weight`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<String>,
}

/// What reserved memory was at one moment. Reserved is the sum of allocated, waiting, returnable and pinned.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct ReservedSummary {
    /// Blocks in use, rounded.
    pub allocated_bytes: u64,
    /// Of that, what rounding added to what was asked for.
    pub rounding_bytes: u64,
    /// Given back, but streams still use it.
    pub waiting_bytes: u64,
    /// Free: unused segments and pages, which can be returned to CUDA.
    pub returnable_bytes: u64,
    /// Free beside live blocks, which pin it.
    pub pinned_bytes: u64,
    /// The largest free block.
    pub largest_free_bytes: u64,
    /// Segments.
    pub segments: u64,
    /// Of these, segments with live blocks and pinned memory.
    pub pinned_segments: u64,
    /// Who alone pins segments, most free bytes first.
    pub pins: Vec<PinSummary>,
}

/// Live blocks of one origin that pin segments in which nothing else lives.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct PinSummary {
    /// Segments.
    pub segments: u64,
    /// Their size.
    pub segment_bytes: u64,
    /// Blocks.
    pub blocks: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// What is free in the segments, and cannot be returned.
    pub free_bytes: u64,
    /// Whose blocks.
    pub by: StackSummary,
    /// What the largest of them is called, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// What the second step needs beyond the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct SecondStepSummary {
    /// The peak of the first step.
    pub first_peak_bytes: u64,
    /// The highest peak of later steps.
    pub later_peak_bytes: u64,
    /// The optimizer state that was made in the first step.
    pub optimizer_state_bytes: u64,
}

/// What would lower a moment.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct ActionSummary {
    /// The rule.
    pub rule: String,
    /// What to do.
    pub what: String,
    /// What it saves, worked out from this run.
    pub saves_bytes: u64,
    /// Whether that is an upper bound: the run does not tell how much less it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_most: bool,
    /// The rule's condition, and the figures of this run.
    pub because: String,
    /// How the saving is worked out.
    pub how: String,
}

/// What other settings of PyTorch's allocator would have done, by a replay of its policy.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct WhatIfSummary {
    /// Blocks that the replay with the run's own settings put where they were.
    pub blocks: u64,
    /// Segment events that it repeated one for one.
    pub segment_events: u64,
    /// Where it first did something else than the recording; then nothing is said of other settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<String>,
    /// The memory that the allocator could have had; the rest of the device is held as recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Reserved at most, with the run's own settings.
    pub reserved_bytes: u64,
    /// Other settings.
    pub settings: Vec<ReplayedSetting>,
}

/// One of them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct ReplayedSetting {
    /// As `PYTORCH_CUDA_ALLOC_CONF` takes it.
    pub setting: String,
    /// Whether the request that failed would have got its memory; absent where none failed, or the replay cannot tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
    /// Whether an earlier request would have failed.
    pub fails_earlier: bool,
    /// Reserved at most, up to the error where there was one.
    pub reserved_bytes: u64,
}

/// A stack.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct StackSummary {
    /// In a few words: the program's own line, and the library's where that is innermost.
    pub place: String,
    /// The autograd node that ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Its frames, innermost first; with a node, those of the forward call that made it.
    pub frames: Vec<FrameSummary>,
}

/// A frame.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct FrameSummary {
    /// The function.
    pub name: String,
    /// The file; of native code without a known source the object.
    pub filename: String,
    /// The line; 0 where it is unknown.
    pub line: u32,
    /// Whether it is native code; absent for Python's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub native: bool,
}

/// What a phase did.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct PhaseSummary {
    /// Which.
    pub phase: Phase,
    /// Blocks allocated.
    pub allocations: u64,
    /// Bytes allocated.
    pub allocated_bytes: u64,
    /// Blocks freed.
    pub frees: u64,
    /// Bytes freed.
    pub freed_bytes: u64,
    /// Bytes added to what is allocated, or taken from it.
    pub net_bytes: i64,
    /// The highest number of allocated bytes during the phase.
    pub peak_bytes: u64,
    /// Allocated bytes after it.
    pub after_bytes: u64,
    /// What it kept beyond its end, by category, most first.
    pub kept: Vec<KeptSummary>,
    /// What it gave back of what others had kept.
    pub given_back: Vec<CategoryAmount>,
    /// The explanation of its net, in words; empty when there is none.
    pub explanation: String,
}

/// What a device's memory did in the ranges of one name (`torch.profiler.record_function`, NVTX), on whichever thread.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct LabelSummary {
    /// The name; it ends in `*` where it stands for several that differ in the number at their end.
    pub name: String,
    /// `record_function` or `nvtx`.
    pub origin: String,
    /// The rule that knows it as PyTorch's own; absent for the program's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// How often it was entered.
    pub times: u64,
    /// Blocks allocated.
    pub allocations: u64,
    /// Bytes allocated.
    pub allocated_bytes: u64,
    /// Blocks freed.
    pub frees: u64,
    /// Bytes freed.
    pub freed_bytes: u64,
    /// Bytes allocated in a range and still there at its end.
    pub kept_bytes: u64,
    /// The highest number of allocated bytes in a range.
    pub peak_bytes: u64,
    /// Allocated bytes at the end of the last one.
    pub after_bytes: u64,
    /// How long they took, all together.
    pub duration_ns: u64,
}

/// What a phase kept of one category.
#[derive(Clone, PartialEq, Debug, Serialize, JsonSchema)]
pub struct KeptSummary {
    /// Which.
    pub category: Category,
    /// Bytes.
    pub bytes: u64,
    /// Bytes as asked for.
    pub requested_bytes: u64,
    /// Blocks.
    pub blocks: u64,
    /// The largest source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest: Option<SourceSummary>,
}

/// A source of kept bytes.
#[derive(Clone, PartialEq, Debug, Serialize, JsonSchema)]
pub struct SourceSummary {
    /// Bytes.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
    /// From where.
    pub stack: StackSummary,
}

/// One step.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct StepSummary {
    /// Which.
    pub step: u32,
    /// When it began.
    pub time_ns: u64,
    /// How long it took.
    pub duration_ns: u64,
    /// Its phases, without explanations.
    pub phases: Vec<StepPhase>,
}

/// One phase of one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct StepPhase {
    /// Which.
    pub phase: Phase,
    /// Blocks allocated.
    pub allocations: u64,
    /// Bytes allocated.
    pub allocated_bytes: u64,
    /// Bytes freed.
    pub freed_bytes: u64,
    /// The difference.
    pub net_bytes: i64,
    /// The highest number of allocated bytes.
    pub peak_bytes: u64,
}

/// An out-of-memory error.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct OomSummary {
    /// The rounded request.
    pub wanted_bytes: u64,
    /// Who asked.
    pub by: StackSummary,
    /// The rule that gave the phase.
    pub rule: String,
    /// What was there.
    pub there: MomentSummary,
    /// What CUDA said was free.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_free_bytes: Option<u64>,
    /// Reserved and not allocated.
    pub cached_bytes: u64,
    /// The largest free block of the caching allocator.
    pub largest_free_bytes: u64,
    /// What this process held outside the caching allocator.
    pub outside_allocator_bytes: u64,
    /// The same, by owner, most first.
    pub outside: Vec<OutsideSummary>,
    /// What was in use on the device besides all that: CUDA contexts, other processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub others_bytes: Option<u64>,
    /// CUDA had the memory: PyTorch's own limit (`set_per_process_memory_fraction`) refused the request.
    pub refused_by_pytorch: bool,
    /// What it lacked: the request less what CUDA had; absent where that is not known, or not why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub short_bytes: Option<u64>,
    /// What the memory was for, where names and their order tell: the optimizer's state of a parameter, e.g. `Adam.exp_avg_sq of 3.weight`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted_for: Option<String>,
    /// The only parameter (or other named tensor) alive that is as large as the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub as_large_as: Option<String>,
    /// What the optimizer's state would have taken in all, when the error came while it was being made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_needed_bytes: Option<u64>,
    /// Whether it ended the process; absent when that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fatal: Option<bool>,
}

/// Memory outside PyTorch's caching allocator.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct OutsideSummary {
    /// Who obtained it from CUDA: `NCCL`, `cuBLAS`, ...
    pub owner: String,
    /// Bytes.
    pub bytes: u64,
}

/// Memory by who obtained it from CUDA.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct OwnerSummary {
    /// For people: `PyTorch's caching allocator`, `NCCL`, ...
    pub owner: String,
    /// The object that called CUDA; absent for the caching allocator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    /// Bytes at the end.
    pub end_bytes: u64,
    /// Bytes at most.
    pub peak_bytes: u64,
    /// Allocations.
    pub allocations: u64,
}

/// A rule's work.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct ReasonSummary {
    /// The rule.
    pub rule: String,
    /// The phase it gave.
    pub phase: Phase,
    /// A frame it rested on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<FrameSummary>,
    /// Allocations it decided.
    pub allocations: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What a rule about categories decided.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct CategoryReasonSummary {
    /// The rule.
    pub rule: String,
    /// The category it gave.
    pub category: Category,
    /// A frame it rested on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<FrameSummary>,
    /// Blocks it decided.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A schema as text, exactly as its file stores it.
pub(super) fn schema_text(schema: &schemars::Schema) -> String {
    let mut text = serde_json::to_string_pretty(schema).unwrap_or_default();
    text.push('\n');
    text
}

impl Summary {
    /// The JSON Schema of `summary.json`, generated from these structures and their documentation.
    pub fn json_schema() -> String {
        schema_text(&schemars::schema_for!(Summary))
    }

    /// The content of `summary.json`.
    pub fn to_json(&self) -> String {
        // Serializing these plain structures cannot fail.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        printable::json(text)
    }
}
