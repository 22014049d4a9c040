//! Exports recordings to files for other programs.

mod background;
mod blocks;
mod flame;
mod flame_picture;
mod frames;
mod metadata;
mod perfetto;
mod phrase;
mod pickle;
mod pictures;
mod snapshot;
mod sources;
mod tables;
mod timeline;
mod window;

pub use blocks::blocks_csv;
pub use flame::{FlameForm, FlameOf, flame};
pub use frames::SYNTHETIC;
pub use perfetto::perfetto;
pub use snapshot::{SnapshotOptions, SnapshotReport, snapshot};
pub use tables::{TABLES, tables};
pub use timeline::{TimelineForm, timeline};
pub use window::{LeftOut, Selection, Window, run_began_ns};

pub use pictures::{PICTURE_STYLE, Picture, pictures};
pub use sources::Sources;
