//! Unwind information of any object that a traced process may load: the rule of an address, the function around it, the
//! build id.
//!
//! The input has the positions of the tables and the queried address, then the object as mapped in memory.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| memtrace_stackwalk::native::fuzzing::unwind(data));
