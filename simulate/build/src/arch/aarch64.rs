//! AArch64.

/// The number of the architecture in ELF files.
pub(crate) const MACHINE: u16 = object::elf::EM_AARCH64;
/// Its name.
pub(crate) const NAME: &str = "AArch64";
/// The largest size of a page of memory, in bytes.
pub(crate) const LARGEST_PAGE: u64 = 65536;
/// Where Debian has libraries.
pub(crate) const LIBRARIES: &str = "/usr/lib/aarch64-linux-gnu";

/// The size of the code of a stub in bytes, with padding.
pub(crate) const STUB_BYTES: usize = 16;

/// The code of a stub at the address `at`: passes the address `record`, which is less than 1 MiB away, to the function
/// at `target`, which is less than 128 MiB away, with all argument registers unchanged.
pub(crate) fn stub(at: u64, record: u64, target: u64) -> [u8; STUB_BYTES] {
    let distance = record.wrapping_sub(at + 4) as u32;
    let jump = target.wrapping_sub(at + 8);
    let words = [
        // bti c
        0xd503_245f,
        // adr x16, record
        0x1000_0010 | (distance & 3) << 29 | (distance >> 2 & 0x7_ffff) << 5,
        // b target
        0x1400_0000 | (jump >> 2) as u32 & 0x3ff_ffff,
        // brk #0
        0xd420_0000_u32,
    ];
    let mut code = [0; STUB_BYTES];
    code.as_chunks_mut().0.iter_mut().zip(words).for_each(|(place, word)| *place = word.to_le_bytes());
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stub_passes_its_record() {
        let code = stub(0x5010, 0x5033, 0x1000);
        let word = |index: usize| u32::from_le_bytes(code.as_chunks().0[index]);
        // adr x16, #0x1f; b -0x4018.
        assert_eq!((word(1), word(2)), (0x7000_00f0, 0x17ff_effa));
    }
}
