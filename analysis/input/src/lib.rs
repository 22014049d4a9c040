//! Turns paths into streams of events: run folders, traces and PyTorch snapshots, and the names of native code in them.

mod address_map;
pub mod error;
mod folder;
pub mod load;
pub mod printable;
mod recording;
mod survey;
pub mod symbols;

pub use address_map::{AddressHasher, AddressHashing, AddressMap};
pub use error::{Error, Result};
pub use folder::{NewFile, RunFolder};
pub use load::{Process, Run, open_run, open_run_heard};
pub use recording::{LostEvents, MemoryRecording, Recording};
pub use survey::{Lane, Survey};
