//! Names native code after the recording: functions (including inlined ones), files and lines of the addresses in a
//! trace.
//!
//! A recording stores an object's build id and an address. This module turns them into frames.
//! [`Symbols::resolve_missing`] looks up what the run's own `symbols.json` lacks, only in files with the recorded build
//! id. [`Symbols::symbolize`] puts the result into a trace's definitions, where all other code reads frames. So no
//! pass, report or export deals with symbols.
//!
//! Files are mapped one object at a time, and only if frames refer to them. All addresses of an object are looked up
//! together. Problems with a file are reported and cost at most its names.

mod demangle;
mod dwarf;
mod elf;
mod metered;
mod object_symbols;
mod run_symbols;
mod search;
mod store;
mod symbol_table;

pub use demangle::FunctionName;
pub use object_symbols::{ElfObjectId, ObjectSymbols};
pub use run_symbols::{ObjectReport, Symbols};
pub use search::{Search, build_id};
pub use store::SYMBOLS_FILE;
