//! Exports recordings to files for other programs.
//!
//! ```
//! use memtrace_output::{Window, blocks_csv};
//!
//! let run = memtrace_input::open_run("../../tests/golden/snapshots/resnet_leak.pickle.gz")?;
//! let mut csv = Vec::new();
//! blocks_csv(&run.processes()[0], &Window::WHOLE, None, &mut csv, &mut |_events_read| {})?;
//! assert!(csv.starts_with(b"device,address,size,"));
//! # Ok::<(), memtrace_input::Error>(())
//! ```

mod background;
mod block_sums;
mod csv;
mod flame_graph;
mod frames;
mod metadata;
mod named_ranges;
mod page_data;
mod perfetto;
mod phrase;
mod pickle;
mod pprof;
mod snapshot;
mod sources;
mod tables;
mod timeline;
mod window;

pub use block_sums::FlameWeight;
pub use csv::blocks_csv;
pub use flame_graph::{FlameFormat, flame_graph};
pub use frames::SYNTHETIC;
pub use page_data::{PageDataOptions, RankSeries, page_data, rank_totals};
pub use perfetto::perfetto;
pub use pprof::pprof;
pub use snapshot::{SnapshotOptions, SnapshotReport, snapshot};
pub use tables::{
    RANKS_FILE, RANKS_TABLE, RankAssignment, RankRow, RowDevice, RowExit, RowPeaks, RowProcess, RowRun, TABLES,
    TableLayout, partition_folder, read_ranks, tables, unpartitioned_value, write_ranks,
};
pub use timeline::{TimelineFormat, timeline};
pub use window::{LeftOut, Selection, Window, run_start_ns};

pub use sources::{NoSource, SOURCES_FILE, SourceAccess, SourceFiles, SourceHashes};
