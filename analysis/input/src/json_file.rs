//! Reads JSON files of run folders within a budget.

use std::fs::File;
use std::io;

use memtrace_trace::file::budget::json_memory;
use memtrace_trace::file::{Budget, untrusted};
use serde::de::DeserializeOwned;

/// Parses an open file of at most `limit` bytes. The parser limits the nesting depth.
///
/// # Errors
///
/// If the file cannot be read, is larger, is not JSON of this type, or needs more memory than the budget has.
pub(crate) fn read<T: DeserializeOwned>(file: &File, limit: u64, budget: &Budget) -> io::Result<T> {
    budget.add_file(file)?;
    let text = untrusted::read(file, limit)?;
    budget.hold(json_memory(&text)).map_err(io::Error::other)?;
    Ok(serde_json::from_slice(&text)?)
}
