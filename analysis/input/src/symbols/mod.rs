//! Names of native code, found afterwards: functions, inlined ones too, files and lines of the addresses that a trace holds.
//!
//! Recording keeps an object's build id and an address; here they become frames. [`Symbols::complete`] looks up what the
//! run's own `symbols.json` does not have, in files that have the recorded build id and in no others, and
//! [`Symbols::name_frames`] puts the result into a trace's definitions, from where everything reads frames: no pass, report or
//! export knows of symbols.
//!
//! Files are mapped one object at a time, only when frames name them, and every address of an object is looked up in one go.
//! What is wrong with a file is told and costs at most the names.

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
