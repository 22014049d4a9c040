//! Reports for people and programs.
//!
//! [`summarize`] turns a run into a [`Summary`], the structure of `summary.json`. The end-of-run summary uses only that
//! structure, so text and JSON always agree.

mod build;
mod check;
mod compare;
mod diagnosis;
mod diff;
mod diff_page;
mod explain;
mod finish;
mod html_page;
mod lines;
mod lines_page;
mod places;
mod same_lines;
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
pub use check::{Baseline, CHECK_VERSION, CheckReport, CheckResult, CheckWanted, Tolerance, check};
pub use compare::diff;
pub use diff::{
    CategoryChange, Change, DIFF_VERSION, DevicePair, DiffMoment, DiffReport, DiffRun, DiffWanted, LineChange,
    ModuleChange, PhaseChange, StackChange, Unpaired, Verdict,
};
pub use finish::{FinishOptions, Progress, Written, finish_run};
pub use html_page::html_page;
pub use lines::{FunctionLines, LINES_VERSION, LineFigures, LineRow, LinesReport, LinesWanted, OtherDevice, lines};
pub use sections::{SECTIONS, Section};
pub use summary::*;
pub use text::TextOptions;
pub use units::{count_text, duration_text, size_text};
pub use why::Replaying;
