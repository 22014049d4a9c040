//! Names native code after the recording: functions (including inlined ones), files and lines of the addresses in a
//! trace.
//!
//! A recording stores an object's build id and an address. This module turns them into frames. [`Symbols::complete`]
//! looks up what the run's own `symbols.json` lacks, only in files with the recorded build id. [`Symbols::name_frames`]
//! puts the result into a trace's definitions, where all other code reads frames. So no pass, report or export deals
//! with symbols.
//!
//! Files are mapped one object at a time, and only if frames refer to them. All addresses of an object are looked up
//! together. Problems with a file are reported and cost at most its names.

mod dwarf;
mod elf;
mod metered;
mod names;
mod object_symbols;
mod search;
mod store;
mod symbol_table;
mod table;

pub use names::FunctionName;
pub use object_symbols::{ObjectId, ObjectSymbols};
pub use search::{Search, build_id};
pub use store::SYMBOLS_FILE;
pub use table::{ObjectReport, Symbols};
