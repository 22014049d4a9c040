//! The entry of the stubs: functions that packages import, and that nobody wrote.

use crate::state::machine;
use simcuda::error::Error;
use simcuda::stub::Call;
use std::ffi::c_int;

/// The verbs of functions that give nothing back but their status.
const WITHOUT_RESULT: [&str; 16] = [
    "Close",
    "Copy",
    "Destroy",
    "Encode",
    "Flush",
    "Prefetch",
    "Release",
    "Reset",
    "Set",
    "Signal",
    "Start",
    "Stop",
    "Unload",
    "Unmap",
    "Unregister",
    "Write",
];

/// Whether a function gives nothing back but its status, so that a program can go on after a call that did nothing.
fn is_without_result(name: &str) -> bool {
    let is_verb = |(at, verb): (usize, &str)| !name[at + verb.len()..].starts_with(|c: char| c.is_ascii_lowercase());
    WITHOUT_RESULT.iter().any(|verb| name.match_indices(verb).any(is_verb))
}

simcuda::stub_entry!(stub_called_in_driver);

/// Counts a call of a generated stub.
fn stub_called_in_driver(call: Call) -> c_int {
    let name = call.name().to_string_lossy();
    machine().stub(&name);
    if is_without_result(&name) { 0 } else { Error::NotSupported.code() }
}
