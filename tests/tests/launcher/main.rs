//! The `memtrace` command: its command line, transparency, signals, the drain loop, `memtrace doctor`.

mod categories;
mod command_line;
mod doctor;
mod drain;
mod faults;
mod inputs;
#[path = "../launcher_support/mod.rs"]
mod launcher_support;
#[path = "../../../analysis/tests/native_objects/mod.rs"]
mod native_objects;
mod signals;
mod symbols;
mod transparency;
