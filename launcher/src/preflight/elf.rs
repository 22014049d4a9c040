//! Classifies an ELF file from its header and program headers (System V gABI, chapters 4 and 5).

use std::ffi::OsStr;
use std::io::{Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use memtrace_trace::arch::ELF_MACHINE;
use object::elf::{self, FileHeader64, ProgramHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, ReadCache, ReadRef, pod};

/// The maximum length of a loader's path, `PATH_MAX`, in bytes.
const MAX_NAME: u64 = 4096;
/// The maximum size of all program headers that the kernel accepts, in bytes (`load_elf_phdrs` in fs/binfmt_elf.c).
const MAX_PROGRAM_HEADERS: usize = 64 * 1024;

/// The maximum size of a program's dynamic section, in bytes. Large programs have about 1 KiB.
const MAX_DYNAMIC: u64 = 64 * 1024;

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

/// Classifies a program. Reads only the headers and the loader's path, wherever they are: tools such as patchelf move
/// them to the end of the file.
pub(super) fn kind(file: impl Read + Seek) -> Kind {
    let file = ReadCache::new(file);
    let size = file.len().unwrap_or(0).min(size_of::<FileHeader64<Endianness>>() as u64);
    let start = file.read_bytes_at(0, size).unwrap_or_default();
    if !start.starts_with(&elf::ELFMAG) {
        return Kind::NotElf;
    }
    // The missing bytes of a truncated file are 0. A header for 32 bits has the machine in the same place.
    let mut header = [0; size_of::<FileHeader64<Endianness>>()];
    header[..start.len()].copy_from_slice(start);
    let Ok((header, _)) = pod::from_bytes::<FileHeader64<Endianness>>(&header) else { return Kind::NotElf };
    let (class, data) = (header.e_ident.class, header.e_ident.data);
    let endian = if data == elf::ELFDATA2MSB { Endianness::Big } else { Endianness::Little };
    let machine = header.e_machine.get(endian);
    if class != elf::ELFCLASS64 || data != elf::ELFDATA2LSB || machine != ELF_MACHINE {
        let machine = match machine {
            elf::EM_386 => "x86".to_owned(),
            elf::EM_ARM => "ARM".to_owned(),
            elf::EM_X86_64 => "x86-64".to_owned(),
            elf::EM_AARCH64 => "AArch64".to_owned(),
            other => format!("machine {other}"),
        };
        let bits = if class == elf::ELFCLASS64 { 64 } else { 32 };
        return Kind::Foreign { what: format!("a {bits}-bit {machine} program") };
    }
    match interpreter(header, &file) {
        Some(interpreter) => Kind::Dynamic { interpreter },
        None => Kind::Static,
    }
}

/// Whether the program names a library in `DT_NEEDED` for which `is_requested` returns true. False when its headers are
/// invalid.
pub(super) fn needs(file: impl Read + Seek, is_requested: impl Fn(&[u8]) -> bool) -> bool {
    let file = ReadCache::new(file);
    find_needed(&file, is_requested).is_some()
}

fn find_needed<'a>(file: impl ReadRef<'a>, is_requested: impl Fn(&[u8]) -> bool) -> Option<()> {
    let endian = Endianness::Little;
    let header = FileHeader64::<Endianness>::parse(file).ok()?;
    let headers = program_headers(header, file)?;
    let dynamic = headers.iter().find(|segment| segment.p_type(endian) == elf::PT_DYNAMIC)?;
    if dynamic.p_filesz(endian) > MAX_DYNAMIC {
        return None;
    }
    let entries = dynamic.dynamic(endian, file).ok()??;
    let value =
        |tag| entries.iter().find(|entry| entry.d_tag.get(endian) == u64::from(tag)).map(|e| e.d_val.get(endian));
    let strings = value(elf::DT_STRTAB)?;
    // The dynamic section has the address of the strings in memory.
    let offset = headers.iter().find_map(|segment| {
        let inside = strings.checked_sub(segment.p_vaddr(endian))?;
        let is_loaded = segment.p_type(endian) == elf::PT_LOAD && inside < segment.p_filesz(endian);
        is_loaded.then(|| segment.p_offset(endian).checked_add(inside))?
    })?;
    let needed = entries.iter().filter(|entry| entry.d_tag.get(endian) == u64::from(elf::DT_NEEDED));
    let mut names = needed.filter_map(|entry| {
        let start = offset.checked_add(entry.d_val.get(endian))?;
        file.read_bytes_at_until(start..start.checked_add(MAX_NAME)?, 0).ok()
    });
    names.any(is_requested).then_some(())
}

/// The program headers. `None` when they are invalid.
fn program_headers<'a>(
    header: &FileHeader64<Endianness>,
    file: impl ReadRef<'a>,
) -> Option<&'a [ProgramHeader64<Endianness>]> {
    let endian = Endianness::Little;
    // The limit also excludes the number that means "read the number from a section" (`PN_XNUM`).
    let size = usize::from(header.e_phnum.get(endian)) * size_of::<ProgramHeader64<Endianness>>();
    if size > MAX_PROGRAM_HEADERS {
        return None;
    }
    header.program_headers(endian, file).ok()
}

/// The loader's path. `None` when the program has none, or when its headers are invalid.
fn interpreter<'a>(header: &FileHeader64<Endianness>, file: impl ReadRef<'a>) -> Option<PathBuf> {
    let endian = Endianness::Little;
    let headers = program_headers(header, file)?;
    let segment = headers.iter().find(|segment| segment.p_type(endian) == elf::PT_INTERP)?;
    if segment.p_filesz(endian) > MAX_NAME {
        return None;
    }
    let name = segment.interpreter(endian, file).ok()??;
    Some(PathBuf::from(OsStr::from_bytes(name)))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    fn kind(bytes: &[u8]) -> Kind {
        super::kind(Cursor::new(bytes))
    }

    fn this_program() -> Vec<u8> {
        std::fs::read("/proc/self/exe").unwrap()
    }

    #[test]
    fn this_program_is_dynamic_and_any_prefix_is_classified() {
        let program = this_program();
        assert!(matches!(kind(&program), Kind::Dynamic { interpreter } if interpreter.exists()));
        for len in 0..4096 {
            kind(&program[..len]);
        }
    }

    #[test]
    fn needed_libraries_are_found_and_any_prefix_is_harmless() {
        let program = this_program();
        let needs = |name: &[u8]| needs(Cursor::new(&program), |needed| needed == name);
        assert!(needs(b"libc.so.6") && !needs(b"libasan.so.8") && !needs(b""));
        for len in (0..program.len().min(1 << 16)).step_by(7) {
            super::needs(Cursor::new(&program[..len]), |_| true);
        }
    }

    #[test]
    fn programs_of_other_machines_are_recognized() {
        let mut head = this_program()[..4096].to_vec();
        head[18..20].copy_from_slice(&40u16.to_le_bytes());
        head[4] = 1;
        assert_eq!(kind(&head), Kind::Foreign { what: "a 32-bit ARM program".into() });
        // A big-endian header has its numbers the other way round.
        head[4..6].copy_from_slice(&[2, 2]);
        head[18..20].copy_from_slice(&22u16.to_be_bytes());
        assert_eq!(kind(&head), Kind::Foreign { what: "a 64-bit machine 22 program".into() });
        assert_eq!(kind(b"#!/bin/sh"), Kind::NotElf);
        assert_eq!(kind(b"\x7fELF"), Kind::Foreign { what: "a 32-bit machine 0 program".into() });
    }

    #[test]
    fn headers_with_wrong_numbers_have_no_interpreter() {
        let program = this_program()[..4096].to_vec();
        let with = |at: usize, bytes: &[u8]| {
            let mut program = program.clone();
            program[at..at + bytes.len()].copy_from_slice(bytes);
            kind(&program)
        };
        assert!(matches!(with(0, b"\x7f"), Kind::Dynamic { .. }), "the first page has all that is read");
        let (table_offset, entry_size, entries) = (32, 54, 56);
        assert_eq!(with(table_offset, &u64::MAX.to_le_bytes()), Kind::Static);
        assert_eq!(with(table_offset, &(1u64 << 40).to_le_bytes()), Kind::Static);
        assert_eq!(with(entry_size, &0u16.to_le_bytes()), Kind::Static);
        assert_eq!(with(entries, &u16::MAX.to_le_bytes()), Kind::Static);
        // The program headers follow the file header, and the second one is that of the loader's path.
        let interp = (64..).step_by(56).find(|at| program[*at] == 3).unwrap();
        for field in [interp + 8, interp + 32] {
            assert_eq!(with(field, &u64::MAX.to_le_bytes()), Kind::Static);
            assert_eq!(with(field, &(1u64 << 33).to_le_bytes()), Kind::Static);
        }
    }
}
