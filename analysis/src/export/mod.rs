//! Files for other programs.

mod background;
mod frames;
mod phrase;
mod pickle;
mod snapshot;
mod sources;

pub use frames::SYNTHETIC;
pub use snapshot::{SnapshotOptions, SnapshotReport, snapshot};
