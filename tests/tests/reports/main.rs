//! Reports and exports of real runs, against PyTorch's tools, the formats' own readers, and values that the programs
//! compute themselves.

mod cases;
mod categories;
mod ci_example;
mod diagnostics;
mod diff;
mod explained;
mod export_windows;
mod exports;
mod golden_summaries;
mod lines;
mod pools;
mod redact;
mod release_reasons;
mod released;
mod rotation;
#[path = "../../../analysis/tests/showcase/mod.rs"]
mod showcase;
mod suggestions;
mod timeline;
#[path = "../../../analysis/tests/training/mod.rs"]
mod training;
mod without_steps;
