//! The figures of recordings that go on: what `memtrace live` shows.
//!
//! A [`LiveProcess`] follows the trace of one process while the launcher writes it. It keeps the replayed state and
//! goes on from the last block that it has read. Results that need the whole recording (categories, phases, names) come
//! from an analysis of all events, which is repeated: soon if the program runs code that the last one has not seen,
//! else rarely.

mod growth;
mod host;
mod learned;
mod process;
mod report;

pub use host::live_host;
pub use process::{Advance, AnalysisPauses, LiveProcess};
pub use report::{
    LIVE_VERSION, LiveDevice, LiveGrowth, LiveHost, LiveProcessReport, LiveRecording, LiveReport, LiveStack, LiveTensor,
};
