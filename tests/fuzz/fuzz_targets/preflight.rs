//! The launcher's check of a program before it starts: the kind of ELF file.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../../launcher/src/preflight/elf.rs"]
#[allow(dead_code, unused_imports, reason = "part of the launcher")]
mod elf;

struct Program<'a>(&'a [u8]);

impl elf::Bytes for Program<'_> {
    fn at(&self, offset: u64, len: usize) -> Vec<u8> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..)).unwrap_or_default();
        rest[..len.min(rest.len())].to_vec()
    }
}

fuzz_target!(|data: &[u8]| {
    let _ = elf::kind(&Program(data));
});
