//! The launcher's check of a program before it starts: the kind of ELF file.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../../launcher/src/preflight/elf.rs"]
#[allow(dead_code, unused_imports, reason = "part of the launcher")]
mod elf;

fuzz_target!(|data: &[u8]| {
    let _ = elf::kind(std::io::Cursor::new(data));
});
