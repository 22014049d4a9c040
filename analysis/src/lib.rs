//! The analysis of a run: reads traces, writes snapshots and reports.
//!
//! This crate gives the analysis crates one name. Each is a layer and uses only the layers before it. `memtrace-input`
//! opens a run and streams its events. `memtrace-replay` replays them into the state of the allocators.
//! `memtrace-insight` draws conclusions by named rules. `memtrace-rewrite` makes new traces from a trace, and
//! `memtrace-output` files for other programs.
//! `memtrace-summary` makes plain results of the conclusions, and `memtrace-report` draws them for people. No layer
//! keeps the events of a trace in memory: memory use grows with allocated blocks and distinct stacks.
//!
//! ```
//! use memtrace_analysis::export::{FlameFormat, FlameWeight, Window, flame_graph};
//! use memtrace_analysis::{open_run, summarize};
//!
//! let run = open_run("../tests/golden/snapshots/resnet_leak.pickle.gz")?;
//! let summary = summarize(&run, &mut |_progress| {})?;
//! assert_eq!(summary.processes.len(), 1);
//!
//! let mut stacks = Vec::new();
//! let process = &run.processes()[0];
//! flame_graph(process, &Window::WHOLE, FlameWeight::Peak, FlameFormat::Folded, &mut stacks, &mut |_events_read| {})?;
//! assert!(!stacks.is_empty());
//! # Ok::<(), memtrace_analysis::Error>(())
//! ```

pub use memtrace_input::{
    AtomicFile, Error, KeptState, Process, Result, Run, RunFolder, error, load, open_run, open_run_with_progress,
    open_runs, printable, symbols, xla,
};
pub use memtrace_insight::{diagnostics, passes, rules, suggestions};
pub use memtrace_output as export;
pub use memtrace_report::{
    DiffPageRun, FinishOptions, FinishedRun, HTML_REPORT, HtmlOptions, PageWindow, SECTIONS, Section, TextOptions,
    ToText, can_redact, check_text, diff_html, finish_run, github_annotations, html_report, html_window, job_html,
    lines_html, range_text, redact_run, section_text, served_policy,
};
pub use memtrace_rewrite as rewrite;
pub use memtrace_summary::{
    CheckOptions, CheckReport, DiffOptions, DiffReport, FoundRun, JobOptions, JobReport, LinesOptions, LinesReport,
    Progress, Replaying, Summary, SummaryOptions, Tolerance, check, diff, find_runs, host_kill, is_run_folder,
    job_report, lines, rank_rows, rank_rows_of_run, summarize, summarize_with,
};

/// The results of an analysis, and their texts.
pub mod report {
    pub use memtrace_report::*;
    pub use memtrace_summary::*;
}

/// The replayed state of the allocators, and the recordings that are replayed.
pub mod model {
    pub use memtrace_input::{
        AddressBuildHasher, AddressHasher, EventSource, LostEvents, MemoryRecording, Recording, TraceIndex,
    };
    pub use memtrace_replay::*;
}
