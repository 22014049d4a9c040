//! The contract between the traced process (`interpose`), the launcher that drains it and the analysis that reads the
//! trace file. It imports no other crate of memtrace.
//!
//! There are two formats with different promises. [`shm`] lives for one run and one build and must match exactly.
//! [`file`](mod@file) lives for years and is specified byte for byte in `trace/FORMAT.md`.
//!
//! ```
//! use memtrace_trace::event::{Action, Event};
//! use memtrace_trace::file::{End, Reader, Writer};
//!
//! let mut writer = Writer::new(Vec::new(), r#"{"pid": 7}"#)?;
//! writer.event(&Event { seq: 1, action: Action::Alloc, addr: 0x7f00_0000_0000, size: 512, ..Event::EMPTY })?;
//! let bytes = writer.finish(&End { reason: "exited".into(), ..End::default() })?;
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("7.mtr");
//! std::fs::write(&path, bytes)?;
//! let reader = Reader::open(&path)?;
//! assert_eq!(reader.event_count(), 1);
//! for block in reader.events() {
//!     assert_eq!(block.map_err(|lost| lost.why)?[0].size, 512);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod action;
pub mod api;
pub mod arch;
pub mod clock;
pub mod counters;
pub mod definition;
pub mod error;
pub mod event;
#[cfg(feature = "file")]
pub mod file;
pub mod generated;
pub mod ids;
pub mod named;
pub mod options;
pub mod printable;
pub mod rotation;
pub mod shm;
mod source;
pub mod sync;
pub mod unrecorded;
pub mod version;
pub mod wire;
