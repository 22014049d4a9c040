//! The mappings of another process, and the symbols of the files that it has loaded.

use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::Context;
use object::elf::PT_LOAD;
use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, Object, ObjectSymbol};

use super::arch::RETURN_FROM_SIGNAL;
use super::tracee::Memory;

/// How many bytes at the beginning of a function are compared with its file.
const COMPARED_BYTES: usize = 16;

/// One line of `/proc/PID/maps`.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) offset: u64,
    pub(super) is_writable: bool,
    pub(super) is_executable: bool,
    pub(super) path: Vec<u8>,
}

impl Mapping {
    /// The name of the mapped file. Empty without one.
    pub(super) fn file_name(&self) -> &[u8] {
        self.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
    }
}

/// All mappings of a process.
pub(super) fn mappings(pid: u32) -> std::io::Result<Vec<Mapping>> {
    let text = fs::read(format!("/proc/{pid}/maps"))?;
    let parse = |line: &[u8]| {
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        let mut next = || fields.next().and_then(|field| std::str::from_utf8(field).ok());
        let (start, end) = next()?.split_once('-')?;
        let (protection, offset) = (next()?, next()?);
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let (is_writable, is_executable) = (protection.contains('w'), protection.contains('x'));
        let (start, end, offset) = (hex(start)?, hex(end)?, hex(offset)?);
        let path = fields.nth(2).unwrap_or_default().trim_ascii_start().to_vec();
        Some(Mapping { start, end, offset, is_writable, is_executable, path })
    };
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// The address of these bytes in the code of a file. `file` is any of its mappings.
pub(super) fn find_code(memory: &Memory, mappings: &[Mapping], file: &Mapping, code: &[u8]) -> Option<u64> {
    const MAX_CODE: u64 = 8 << 20;
    mappings.iter().filter(|mapping| mapping.path == file.path && mapping.is_executable).find_map(|mapping| {
        let mut bytes = vec![0; (mapping.end - mapping.start).min(MAX_CODE) as usize];
        memory.read(mapping.start, &mut bytes).ok()?;
        bytes.windows(code.len()).position(|part| part == code).map(|at| mapping.start + at as u64)
    })
}

/// The address of the code to which signal handlers return, in the C library, otherwise in the kernel's own object
/// (vDSO).
pub(super) fn find_signal_return(memory: &Memory, mappings: &[Mapping], c_library: &Mapping) -> Option<u64> {
    let vdso = mappings.iter().find(|mapping| mapping.path == b"[vdso]");
    let mut files = [Some(c_library), vdso].into_iter().flatten();
    files.find_map(|file| find_code(memory, mappings, file, &RETURN_FROM_SIGNAL))
}

/// A loaded ELF object with its symbols.
pub(super) struct LoadedFile {
    bytes: Vec<u8>,
    bias: u64,
}

impl LoadedFile {
    /// Reads the file of which `first` is the first mapping.
    pub(super) fn read(pid: u32, file: &Path, first: &Mapping) -> anyhow::Result<LoadedFile> {
        let cannot = || format!("cannot read {} of process {pid}", file.display());
        let bytes = fs::read(file).with_context(cannot)?;
        let elf = ElfFile64::<Endianness>::parse(&*bytes).with_context(cannot)?;
        let (endian, headers) = (elf.endian(), elf.elf_program_headers());
        let load = |header: &&_| ProgramHeader::p_type(*header, endian) == PT_LOAD;
        let header = headers.iter().find(load).with_context(cannot)?;
        // The first segment of an object is mapped from the page of its offset. Address and offset are at the same
        // place in their pages.
        let bias =
            (first.start - first.offset).wrapping_sub(header.p_vaddr(endian).wrapping_sub(header.p_offset(endian)));
        Ok(LoadedFile { bytes, bias })
    }

    /// The addresses of exported functions. `None` for those that do not exist, or that differ in memory from the file.
    pub(super) fn functions<const N: usize>(&self, names: [&str; N], memory: &Memory) -> [Option<Range<u64>>; N] {
        let is_same = |range: &Range<u64>| self.is_same(range.start, memory);
        self.symbols(names).map(|found| found.filter(is_same))
    }

    /// The addresses of exported variables.
    pub(super) fn variables<const N: usize>(&self, names: [&str; N]) -> [Option<Range<u64>>; N] {
        self.symbols(names)
    }

    fn symbols<const N: usize>(&self, names: [&str; N]) -> [Option<Range<u64>>; N] {
        let mut found = [const { None }; N];
        let Ok(elf) = ElfFile64::<Endianness>::parse(&*self.bytes) else { return found };
        for symbol in elf.dynamic_symbols().filter(|symbol| symbol.is_definition()) {
            let index = symbol.name().ok().and_then(|name| names.iter().position(|one| *one == name));
            if let Some(place) = index.and_then(|index| found.get_mut(index)) {
                let start = symbol.address().wrapping_add(self.bias);
                *place = Some(start..start.saturating_add(symbol.size()));
            }
        }
        found
    }

    /// Whether the process has the bytes of the file at the beginning of a function.
    fn is_same(&self, address: u64, memory: &Memory) -> bool {
        let Ok(elf) = ElfFile64::<Endianness>::parse(&*self.bytes) else { return false };
        let (endian, in_file) = (elf.endian(), address.wrapping_sub(self.bias));
        let of_file = elf.elf_program_headers().iter().find_map(|header| {
            let at = in_file.checked_sub(header.p_vaddr(endian)).filter(|at| *at < header.p_filesz(endian))?;
            let start = (header.p_offset(endian) + at) as usize;
            (header.p_type(endian) == PT_LOAD).then(|| self.bytes.get(start..start + COMPARED_BYTES))?
        });
        let mut here = [0; COMPARED_BYTES];
        of_file.is_some_and(|bytes| memory.read(address, &mut here).is_ok() && here == bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn functions_of_this_process_are_found_in_its_files() {
        let pid = std::process::id();
        let mappings = mappings(pid).unwrap();
        let c_library = mappings.iter().find(|one| one.file_name().starts_with(b"libc.so.6")).unwrap();
        let path = PathBuf::from(OsStr::from_bytes(&c_library.path));
        let memory = Memory::of(pid).unwrap();
        let file = LoadedFile::read(pid, &path, c_library).unwrap();
        let [found, none] = file.functions(["getppid", "no_such_function"], &memory);
        // SAFETY: a C string.
        let expected = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"getppid".as_ptr()) };
        assert_eq!((found.map(|range| range.start), none), (Some(expected.addr() as u64), None));
        let code = find_signal_return(&memory, &mappings, c_library).unwrap();
        assert!(mappings.iter().any(|one| one.is_executable && (one.start..one.end).contains(&code)));
        assert_eq!(find_code(&memory, &mappings, c_library, b"no such code at all"), None);
    }
}
