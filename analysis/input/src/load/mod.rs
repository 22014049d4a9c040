//! Turns paths into streams of events: run folders, their manifests, and the recordings of single processes.

mod manifest;
mod names;
mod process;
mod recording;
mod run;
mod snapshot;

pub use crate::recording::{LostEvents, MemoryRecording, Recording};
pub use manifest::{Exit, Manifest, ManifestProcess, RUN_MANIFEST};
pub use process::{Process, ProcessInfo};
pub use recording::TraceRecording;
pub use run::open_folder;
pub use run::{Problem, Run, open_run, open_run_heard};
pub use snapshot::{SNAPSHOT_END, SNAPSHOT_TOPIC, SnapshotRecording};
