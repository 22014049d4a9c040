//! Classifies an ELF file from its header and program headers (System V gABI, chapters 4 and 5).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// A description of the programs that can be recorded.
pub(super) const OURS: &str = "64-bit x86-64";
/// `EM_X86_64`, the `e_machine` of these programs.
const MACHINE: u16 = 62;

const PT_INTERP: u32 = 3;
/// The maximum length of a loader's path, `PATH_MAX`, in bytes.
const MAX_NAME: usize = 4096;
const ELFCLASS64: u8 = 2;
const ELFDATA2LSB: u8 = 1;

/// The kind of an executable.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Not an ELF file.
    NotElf,
    /// A program that a dynamic loader loads.
    Dynamic {
        /// The path in `PT_INTERP`.
        interpreter: PathBuf,
    },
    /// A program without a dynamic loader.
    Static,
    /// A program for another machine.
    Foreign {
        /// A description of that machine.
        what: String,
    },
}

fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(b.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(b: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?))
}

/// Random access to the bytes of a file. Tools such as patchelf move headers to the end of the file.
pub(super) trait Bytes {
    /// Up to `len` bytes from `offset` on. Fewer at the end of the file.
    fn at(&self, offset: u64, len: usize) -> Vec<u8>;
}

impl Bytes for std::fs::File {
    fn at(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read = self.read_at(&mut bytes, offset).unwrap_or(0);
        bytes.truncate(read);
        bytes
    }
}

/// Classifies a program.
pub(super) fn kind(file: &impl Bytes) -> Kind {
    let head = &file.at(0, 64);
    if !head.starts_with(b"\x7fELF") {
        return Kind::NotElf;
    }
    let machine = u16_at(head, 18).unwrap_or(0);
    let (class, data) = (head.get(4).copied(), head.get(5).copied());
    if class != Some(ELFCLASS64) || data != Some(ELFDATA2LSB) || machine != MACHINE {
        let machine = match machine {
            3 => "x86".to_owned(),
            40 => "ARM".to_owned(),
            MACHINE => "x86-64".to_owned(),
            183 => "aarch64".to_owned(),
            other => format!("machine {other}"),
        };
        let bits = if class == Some(ELFCLASS64) { 64 } else { 32 };
        return Kind::Foreign { what: format!("a {bits}-bit {machine} program") };
    }
    match interpreter(file, head) {
        Some(interpreter) => Kind::Dynamic { interpreter },
        None => Kind::Static,
    }
}

fn interpreter(file: &impl Bytes, head: &[u8]) -> Option<PathBuf> {
    let (size, count) = (usize::from(u16_at(head, 54)?), usize::from(u16_at(head, 56)?));
    let table = file.at(u64_at(head, 32)?, size * count);
    let entry = table.chunks_exact(size.max(1)).find(|e| u32_at(e, 0) == Some(PT_INTERP))?;
    let len = usize::try_from(u64_at(entry, 32)?).ok().filter(|len| *len <= MAX_NAME)?;
    let name = file.at(u64_at(entry, 8)?, len);
    let name = name.split(|b| *b == 0).next()?;
    Some(PathBuf::from(OsStr::from_bytes(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Bytes for &[u8] {
        fn at(&self, offset: u64, len: usize) -> Vec<u8> {
            self.iter().skip(offset as usize).take(len).copied().collect()
        }
    }

    #[test]
    fn this_program_is_dynamic_and_any_prefix_is_classified() {
        let program = std::fs::read("/proc/self/exe").unwrap();
        assert!(matches!(kind(&program.as_slice()), Kind::Dynamic { interpreter } if interpreter.exists()));
        for len in 0..4096 {
            kind(&&program[..len]);
        }
    }

    #[test]
    fn programs_of_other_machines_are_recognized() {
        let mut head = std::fs::read("/proc/self/exe").unwrap()[..4096].to_vec();
        head[18..20].copy_from_slice(&40u16.to_le_bytes());
        head[4] = 1;
        assert_eq!(kind(&head.as_slice()), Kind::Foreign { what: "a 32-bit ARM program".into() });
        assert_eq!(kind(&b"#!/bin/sh".as_slice()), Kind::NotElf);
    }
}
