//! Unwind information of any object that a traced process may load: the rule of an address, the function around it, the
//! build id.
//!
//! The input has the positions of the tables and the queried address, then the object as mapped in memory.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../../interpose/src/stack/mod.rs"]
#[allow(dead_code, unused_imports, reason = "part of the preloaded library")]
mod stack;

fuzz_target!(|data: &[u8]| stack::native::fuzzing::unwind(data));
