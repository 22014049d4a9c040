//! The meaning of a run's memory use, as plain results: the summary, comparisons, checks and line tables.
//!
//! [`summarize`] turns a run into a [`Summary`], the structure of `summary.json`. [`check`] compares it with limits or
//! a baseline, [`diff`] compares two runs, and [`lines`] gives the figures of source lines. `memtrace-report` draws
//! these results.
//!
//! ```
//! use memtrace_summary::summarize;
//!
//! let run = memtrace_input::open_run("../../tests/golden/snapshots/resnet_leak.pickle.gz")?;
//! let summary = summarize(&run, &mut |_progress| {})?;
//! let device = &summary.processes[0].devices[0];
//! assert!(device.highest.allocated_bytes > 380_880_384);
//! # Ok::<(), memtrace_input::Error>(())
//! ```

mod allocator_advice;
mod beside;
mod build;
mod build_beside;
mod build_host;
mod build_launch;
mod check;
mod colocated;
mod compare;
mod conclusions;
mod cuda_graphs;
mod device_memory;
mod device_names;
mod diff;
mod explain;
mod framework_settings;
mod gaps;
mod holders;
mod host_memory;
mod issue_summary;
mod job;
mod json_text;
mod kv_caches;
mod launch;
mod lines;
mod live;
mod matched_lines;
mod memory_totals;
mod outside_allocation;
mod outside_pytorch;
mod owners;
mod pinned;
mod pool_query;
mod pools;
mod positions;
mod progress;
mod rank_sentences;
mod rank_table;
mod refused;
mod released;
mod schema_text;
mod server;
mod server_cache;
mod server_captures;
mod server_error;
mod server_options;
mod shared_memory;
mod source;
mod statistics;
mod step_estimate;
mod suggestions;
mod summary;
mod tensors;
mod totals;
mod verdict;
mod why;
mod xla;
mod xla_programs;

pub use beside::ProcessBeside;
pub use build::{SummaryOptions, summarize, summarize_with};
pub use build_host::host_kill;
pub use check::{CHECK_VERSION, CheckOptions, CheckReport, CheckResult, Tolerance, check};
pub use colocated::{ActivitySummary, ColocationSummary, HeldPart, Holder};
pub use compare::{diff, line_what};
pub use conclusions::{AllocatorAdvice, OutsidePytorch, RecordingGap, VerdictStatement, VerdictStatus, VerdictSummary};
pub use cuda_graphs::{CudaGraphSummary, CudaGraphsSummary, MemoryPoolSummary};
pub use device_memory::{
    DeviceBreakdown, DeviceMemoryPoint, DeviceMemorySummary, DevicePart, DevicePartKind, OtherProcesses,
};
pub use device_names::{device_name, device_text, process_name};
pub use diff::{
    CategoryChange, Change, CustomCategoryChange, DIFF_VERSION, DevicePair, DiffOptions, DiffPeak, DiffReport,
    DiffResult, DiffRun, LineChange, ModuleChange, PhaseChange, ServerPartChange, StackChange, StageChange,
    UnpairedDevice,
};
pub use host_memory::{HostGrowth, HostKill, HostMemoryState, HostMemorySummary, HostProcessMemory};
pub use job::{
    FoundRun, HostClock, JOB_VERSION, JobOptions, JobOrRuns, JobReport, JobRun, ListedRun, RunList, RunOrigin,
    find_runs, is_run_folder, job_or_runs, job_report, rank_rows, rank_rows_of_run,
};
pub use launch::{IssueProcessSummary, LaunchIssueSummary, LaunchSummary, SharedMemorySummary};
pub use lines::{
    FunctionLines, LINES_VERSION, LineFigures, LineRow, LineTensor, LinesOptions, LinesReport, OtherDevice, lines,
};
pub use live::{
    Advance, AnalysisPauses, LIVE_VERSION, LiveDevice, LiveGrowth, LiveHost, LiveProcess, LiveProcessReport,
    LiveRecording, LiveReport, LiveStack, LiveTensor, live_host,
};
pub use memtrace_insight::rules::is_library;
pub use memtrace_insight::units::{
    UNITS, count_text, duration_text, estimate_text, estimated_duration_text, number_text, share_text,
    signed_size_text, size_text,
};
pub use outside_allocation::OutsideAllocation;
pub use pinned::PinnedLine;
pub use pools::{PoolAllocation, PoolSummary};
pub use positions::{when, when_peaked, when_refused};
pub use progress::Progress;
pub use rank_sentences::launch_sentences;
pub use rank_table::{
    HelperSummary, ImbalanceSummary, RankComparison, RankDevice, RankPhasePeak, RankSummary, RankTable,
};
pub use refused::RefusedRequestSummary;
pub use released::{ReleasedPart, ReleasedPartKind};
pub use schema_text::run_json_schema;
pub use server::{Expectation, KvCacheSummary, ServerPart, ServerSummary, StageSummary, TypeBytes, UtilizationSummary};
pub use server_cache::{KvCachePoint, KvCacheUse};
pub use server_captures::CapturedSize;
pub use statistics::{COLUMNS, POOLS};
pub use step_estimate::{StepEstimate, StepEstimateBasis, StepPart};
pub use summary::*;
pub use verdict::{limit_text, not_recorded, preallocated_text, request, short_text};
pub use why::Replaying;
pub use xla::{XlaKindBytes, XlaLineSummary, XlaPeakSummary, XlaProgramSummary, XlaSummary};
