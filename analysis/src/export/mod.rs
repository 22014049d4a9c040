//! Files for other programs.

mod frames;
mod pickle;
mod snapshot;
mod sources;

pub use frames::SYNTHETIC;
pub use snapshot::{SnapshotOptions, SnapshotReport, snapshot};
