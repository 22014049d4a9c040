//! CPython's line tables of any code object in a traced process.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((head, table)) = data.split_at_checked(8) else { return };
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    memtrace_stackwalk::python::fuzzing::lines(table, word(0), word(4).cast_signed());
});
