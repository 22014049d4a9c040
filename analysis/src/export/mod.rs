//! Files for other programs.

mod background;
mod blocks;
mod frames;
mod metadata;
mod phrase;
mod pickle;
mod snapshot;
mod sources;
mod timeline;

pub use blocks::blocks_csv;
pub use frames::SYNTHETIC;
pub use snapshot::{SnapshotOptions, SnapshotReport, snapshot};
pub use timeline::{TimelineForm, timeline};

pub(crate) use sources::Sources;
