//! Turns paths into streams of events: run folders, traces and PyTorch snapshots, and the names of native code in them.
//!
//! ```
//! use memtrace_trace::event::Action;
//!
//! let run = memtrace_input::open_run("../../tests/golden/snapshots/resnet_leak.pickle.gz")?;
//! let mut segments = 0;
//! for process in run.processes() {
//!     let lost = process.recording().stream(&mut |events| {
//!         segments += events.iter().filter(|event| event.action == Action::SegmentAlloc).count();
//!     });
//!     assert_eq!(lost.events, 0);
//! }
//! assert_eq!(segments, 65);
//! # Ok::<(), memtrace_input::Error>(())
//! ```

mod address_map;
mod compile_contexts;
pub mod error;
mod folder;
mod json_file;
mod kept_state;
pub mod load;
mod packed_state;
pub mod pool_figures;
mod recording;
pub mod symbols;
mod trace_index;
pub mod xla;

pub use address_map::{AddressBuildHasher, AddressHasher, AddressMap};
pub use compile_contexts::{CompileContextId, CompileContexts};
pub use error::{Error, Result};
pub use folder::{AtomicFile, RunFolder};
pub use kept_state::{KeptBlock, KeptPosition, KeptProgress, KeptState};
pub use load::{Process, Run, open_run, open_run_with_progress, open_runs};
pub use memtrace_trace::file::Budget;
pub use memtrace_trace::printable;
pub use recording::{LostEvents, MemoryRecording, Recording};
pub use trace_index::{EventSource, TraceIndex};
