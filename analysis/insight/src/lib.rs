//! Conclusions from a replayed recording: the [`passes`] draw them, each by a named rule of [`rules`]. [`suggestions`]
//! replay the recording with changes to the program.
//!
//! ```
//! use memtrace_insight::passes::Analysis;
//!
//! let run = memtrace_input::open_run("../../tests/golden/snapshots/resnet_leak.pickle.gz")?;
//! let process = &run.processes()[0];
//! let analysis = Analysis::of(process.recording(), process.trace_index(), &mut |_events_read| {});
//! let device = &analysis.devices[0];
//! assert_eq!(device.table.steps(), 3);
//! assert_eq!(device.ooms.count(), 0);
//! # Ok::<(), memtrace_input::Error>(())
//! ```

pub mod diagnostics;
pub mod locations;
pub mod passes;
pub mod rules;
mod stack_summary;
pub mod suggestions;
pub mod units;
mod wrappers;

pub use stack_summary::{FrameSummary, StackSummary};
