//! What the targets share: memory that is counted, a folder for files, and the way through the analysis.

mod memory;
mod run;

pub use memory::Metered;
pub use run::{Folder, analyse};
