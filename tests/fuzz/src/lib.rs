//! Shared by the fuzz targets: an allocator with a limit, a folder for files, and a run through the whole analysis.

mod memory;
mod run;

pub use memory::LimitedAllocator;
pub use run::{Folder, analyse};
