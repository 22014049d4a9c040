//! What reports and exports say of real runs, against PyTorch's tools, the formats' own readers and what the programs know of themselves.

mod ci_example;
mod diagnostics;
mod diff;
mod explained;
mod export_windows;
mod exports;
mod golden_summaries;
mod lines;
#[path = "../../../analysis/tests/showcase/mod.rs"]
mod showcase;
mod timeline;
#[path = "../../../analysis/tests/training/mod.rs"]
mod training;
