//! The contract between the traced process (`interpose`), the launcher that drains it and the analysis that reads the
//! trace file. It imports no other crate of memtrace.
//!
//! There are two formats with different promises. [`shm`] lives for one run and one build and must match exactly.
//! [`file`](mod@file) lives for years and is specified byte for byte in `trace/FORMAT.md`.

pub mod api;
pub mod clock;
pub mod counters;
pub mod definition;
pub mod error;
pub mod event;
#[cfg(feature = "file")]
pub mod file;
pub mod generated;
pub mod ids;
pub mod options;
pub mod shm;
pub mod sync;
pub mod version;
pub mod wire;
