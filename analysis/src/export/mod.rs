//! Files for other programs.

mod snapshot;

pub use snapshot::{SnapshotOptions, SnapshotReport, snapshot};
