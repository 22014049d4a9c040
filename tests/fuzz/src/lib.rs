//! Shared by the fuzz targets: an allocator with a limit, a folder for files, a run through the whole analysis, and the
//! trace of a process that uses a device.

mod device_trace;
mod memory;
mod run;

pub use device_trace::device_trace;
pub use memory::LimitedAllocator;
pub use run::{Folder, analyse};
