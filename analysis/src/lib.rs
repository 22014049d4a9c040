//! The analysis of a run: reads traces, writes snapshots and reports.
//!
//! This crate gives the analysis crates one name. Each is a layer and uses only the layers before it. `memtrace-input`
//! opens a run and streams its events. `memtrace-replay` replays them into the state of the allocators.
//! `memtrace-insight` draws conclusions by named rules. `memtrace-output` writes files for other programs, and
//! `memtrace-report` writes for people. No layer keeps the events of a trace in memory: memory use grows with allocated
//! blocks and distinct stacks.

pub use memtrace_input::{
    Error, NewFile, Process, Result, Run, RunFolder, error, load, open_run, open_run_heard, printable, symbols,
};
pub use memtrace_insight::{passes, rules};
pub use memtrace_output as export;
pub use memtrace_report as report;
pub use memtrace_report::{
    Baseline, CheckReport, CheckWanted, DiffReport, DiffWanted, FinishOptions, LinesReport, LinesWanted, Progress,
    Replaying, SECTIONS, Section, Summary, TextOptions, Tolerance, Written, check, diff, finish_run, html_page, lines,
    summarize, summarize_with,
};

/// The replayed state of the allocators, and the recordings that are replayed.
pub mod model {
    pub use memtrace_input::{AddressHasher, AddressHashing, Lane, LostEvents, MemoryRecording, Recording, Survey};
    pub use memtrace_replay::*;
}
