//! x86-64.

/// The number of the architecture in ELF files.
pub(crate) const MACHINE: u16 = object::elf::EM_X86_64;
/// Its name.
pub(crate) const NAME: &str = "x86-64";
/// The largest size of a page of memory, in bytes.
pub(crate) const LARGEST_PAGE: u64 = 4096;
/// Where Debian has libraries.
pub(crate) const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// The size of the code of a stub in bytes, with padding.
pub(crate) const STUB_BYTES: usize = 16;

/// The code of a stub at the address `at`: passes the address `record` to the function at `target`, with all argument
/// registers unchanged.
pub(crate) fn stub(at: u64, record: u64, target: u64) -> [u8; STUB_BYTES] {
    let mut code = [0xcc; STUB_BYTES];
    // lea rax, [rip + record]
    code[..3].copy_from_slice(&[0x48, 0x8d, 0x05]);
    code[3..7].copy_from_slice(&(record.wrapping_sub(at + 7) as i32).to_le_bytes());
    // jmp target
    code[7] = 0xe9;
    code[8..12].copy_from_slice(&(target.wrapping_sub(at + 12) as i32).to_le_bytes());
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stub_passes_its_record() {
        let code = stub(0x5010, 0x5030, 0x1000);
        assert_eq!(code[..3], [0x48, 0x8d, 0x05]);
        assert_eq!(code[3..7], 25i32.to_le_bytes(), "from the end of lea to the record");
        assert_eq!(code[8..12], (0x1000 - 0x501c_i32).to_le_bytes());
    }
}
