//! Reports for people and programs.
//!
//! [`summarize`] turns a run into a [`Summary`], which is `summary.json` as a structure; the closing page is written from
//! that structure alone, so that text and JSON cannot disagree.

mod build;
mod diagnosis;
mod explain;
mod finish;
mod places;
mod sections;
mod statistics;
mod summary;
mod table;
mod text;
mod units;
mod why;

pub use build::{summarize, summarize_with};
pub use finish::{FinishOptions, Progress, Written, finish_run};
pub use sections::{SECTIONS, Section};
pub use summary::*;
pub use text::TextOptions;
pub use units::{count_text, duration_text, size_text};
pub use why::Replaying;
