//! Unwinding information of any object that a target may load: the rule of an address, the function around it, the build id.
//!
//! The input: where the tables are and which address is asked for, then the object as it lies in memory.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../../interpose/src/stack/mod.rs"]
#[allow(dead_code, unused_imports, reason = "part of the preloaded library")]
mod stack;

fuzz_target!(|data: &[u8]| stack::native::fuzzing::unwind(data));
