//! Reports for people and programs.
//!
//! [`summarize`] turns a run into a [`Summary`], the structure of `summary.json`. The end-of-run summary uses only that
//! structure, so text and JSON always agree.
//!
//! ```
//! use memtrace_report::{TextOptions, summarize};
//!
//! let run = memtrace_input::open_run("../../tests/golden/snapshots/resnet_leak.pickle.gz")?;
//! let summary = summarize(&run, &mut |_progress| {})?;
//! let device = &summary.processes[0].devices[0];
//! assert!(device.highest.allocated_bytes > 380_880_384);
//! print!("{}", summary.to_text(&TextOptions::default()));
//! # Ok::<(), memtrace_input::Error>(())
//! ```

mod build;
mod check;
mod compare;
mod diagnosis;
mod diff;
mod diff_text;
mod explain;
mod finish;
mod html;
mod lines;
mod lines_text;
mod locations;
mod matched_lines;
mod sections;
mod source;
mod statistics;
mod summary;
mod table;
mod tensors;
mod text;
mod units;
mod why;

pub use build::{summarize, summarize_with};
pub use check::{Baseline, CHECK_VERSION, CheckOptions, CheckReport, CheckResult, Tolerance, check};
pub use compare::diff;
pub use diff::{
    CategoryChange, Change, DIFF_VERSION, DevicePair, DiffOptions, DiffPeak, DiffReport, DiffResult, DiffRun, LineChange,
    ModuleChange, PhaseChange, StackChange, UnpairedDevice,
};
pub use finish::{FinishOptions, FinishedRun, Progress, finish_run};
pub use html::html_report;
pub use lines::{FunctionLines, LINES_VERSION, LineFigures, LineRow, LinesOptions, LinesReport, OtherDevice, lines};
pub use sections::{SECTIONS, Section};
pub use summary::*;
pub use text::TextOptions;
pub use units::{count_text, duration_text, size_text};
pub use why::Replaying;
