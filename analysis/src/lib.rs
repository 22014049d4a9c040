//! After the run: traces in, snapshots and reports out.
//!
//! The way through the crate: [`load`] opens a run and streams its events, [`model`] replays them into the state of the
//! allocators, [`passes`] draw conclusions by named [`rules`], [`export`] writes files for other programs and [`report`]
//! writes for people. Imports point one way: `report -> export -> passes -> {rules, model} <- load -> symbols`; exports and
//! reports also take the processes that `load` opened, whose native frames [`symbols`] has named. Nothing here keeps events in memory: what is kept grows with live blocks and distinct stacks.

pub mod error;
pub mod export;
mod folder;
pub mod load;
pub mod model;
pub mod passes;
pub mod printable;
pub mod report;
pub mod rules;
pub mod symbols;

pub use error::{Error, Result};
pub use folder::{NewFile, RunFolder};
pub use load::{Process, Run, open_run, open_run_heard};
pub use report::{
    Baseline, CheckReport, CheckWanted, DiffReport, DiffWanted, FinishOptions, LinesReport, LinesWanted, Progress,
    Replaying, SECTIONS, Section, Summary, TextOptions, Tolerance, Written, check, diff, finish_run, html_page, lines,
    summarize, summarize_with,
};
