//! Reports for people and programs.

mod finish;
mod summary;
mod text;

pub use finish::{FinishOptions, Progress, Written, finish_run};
pub use summary::{Summary, summarize};
pub use text::TextOptions;
