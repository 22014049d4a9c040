//! Reads one ELF file in place from a mapping: its identity, its debug sections, its symbol tables.
//!
//! The file's content is not trusted. An unreadable part is an error of that part alone. Sizes that the file claims
//! never decide how much memory is allocated, or how long reading takes: every table entry and every decompressed byte
//! is charged to a [`Budget`]. A table can lie in a hole of the file, which is as long as the file claims and takes no
//! disk space.

use std::borrow::Cow;
use std::io::Read;
use std::ops::Deref;
use std::path::Path;

use memtrace_trace::file::{Budget, untrusted};
use object::Endianness;
use object::elf::{
    ELFCOMPRESS_ZLIB, ELFCOMPRESS_ZSTD, FileHeader64, NT_GNU_BUILD_ID, PT_NOTE, SHT_DYNSYM, SHT_NOBITS, SHT_SYMTAB,
    SectionHeader64,
};
use object::read::elf::{CompressionHeader, FileHeader, NoteIterator, ProgramHeader, SectionHeader};
use object::read::elf::{SectionTable, SymbolTable};

/// The maximum decompressed size of a section, in bytes.
const MAX_DECOMPRESSED: u64 = 2 << 30;
/// The maximum length of the holes in a file beyond the length that it stores, in bytes. Copies of libraries have holes
/// for zeros.
const MAX_HOLES: u64 = 64 << 20;
/// A note takes as long to read as this many steps.
const STEPS_PER_NOTE: u64 = 4;
/// The maximum length of a link to a debug file, in bytes.
const MAX_LINK: usize = 64 << 10;
/// The maximum number of sections. Objects compiled with a section for each function have some ten thousand before they
/// are linked.
const MAX_SECTIONS: usize = 1 << 16;
/// The number of decompressed bytes that are charged at once.
const CHUNK: usize = 256 << 10;
/// The maximum length of a build id, in bytes. Linkers make 20, 8 or 16 bytes.
const MAX_BUILD_ID: usize = 64;

type Header = FileHeader64<Endianness>;

/// The bytes of a file.
#[derive(Debug)]
pub(super) enum Bytes {
    /// Mapped: the kernel reads pages on access.
    Mapped(memmap2::Mmap),
    /// Decompressed from another file.
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps a regular file, and adds its size to the budget. The error is a text.
    pub(super) fn map(path: &Path, budget: &Budget) -> Result<Bytes, String> {
        let file = untrusted::open(path).map_err(|e| io_reason(&e))?;
        budget.add_file(&file).map_err(|e| io_reason(&e))?;
        // Reading a hole takes memory on some file systems, and the file can have tables of any length in it.
        let (len, stored) = (file.metadata().map_or(0, |m| m.len()), untrusted::stored_len(&file).unwrap_or(0));
        if len.saturating_sub(stored) > stored + MAX_HOLES {
            return Err("is a sparse file".to_owned());
        }
        // SAFETY: `Mmap::map` requires that nobody modifies or truncates the file while it is mapped. We cannot enforce
        // that; whoever installs libraries upholds it. Installers replace libraries by new files and do not rewrite
        // them in place. The dynamic loader maps libraries under the same assumption.
        unsafe { memmap2::Mmap::map(&file) }.map(Bytes::Mapped).map_err(|e| io_reason(&e))
    }
}

fn io_reason(e: &std::io::Error) -> String {
    match e.kind() {
        std::io::ErrorKind::NotFound => "does not exist".to_owned(),
        std::io::ErrorKind::Other => e.to_string(),
        _ => format!("cannot be read: {e}"),
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

/// The tables of an ELF file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Elf<'a> {
    budget: &'a Budget,
    data: &'a [u8],
    header: &'a Header,
    endian: Endianness,
    sections: SectionTable<'a, Header>,
    has_section_table: bool,
}

impl<'a> Elf<'a> {
    /// Parses the headers. A truncated file without its section table still has its identity.
    pub(super) fn parse(data: &'a [u8], budget: &'a Budget) -> Result<Elf<'a>, String> {
        let header = Header::parse(data).map_err(|_| "is not a 64-bit ELF file".to_owned())?;
        let endian = header.endian().map_err(|e| e.to_string())?;
        let sections = header.sections(endian, data);
        // Every search reads the whole table.
        let count = sections.as_ref().map_or(0, |sections| sections.len());
        if count > MAX_SECTIONS {
            return Err(format!("has {count} sections, more than the limit of {MAX_SECTIONS}"));
        }
        Ok(Elf {
            budget,
            data,
            header,
            endian,
            has_section_table: sections.is_ok(),
            sections: sections.unwrap_or_default(),
        })
    }

    /// Whether the section table could be read.
    pub(super) fn has_section_table(&self) -> bool {
        self.has_section_table
    }

    /// Whether multi-byte values are little-endian.
    pub(super) fn endianness(&self) -> Endianness {
        self.endian
    }

    /// The GNU build id in lower-case hexadecimal digits; `None` if the file has none.
    pub(super) fn build_id(&self) -> Option<String> {
        // Sections come first, because the program headers of a separate debug file describe another file's contents.
        let in_sections =
            self.sections.iter().find_map(|section| self.gnu_build_id(section.notes(self.endian, self.data).ok()??));
        in_sections.or_else(|| {
            let segments = self.header.program_headers(self.endian, self.data).ok()?;
            segments
                .iter()
                .filter(|segment| segment.p_type(self.endian) == PT_NOTE)
                .take_while(|_| self.budget.work(1).is_ok())
                .find_map(|segment| self.gnu_build_id(segment.notes(self.endian, self.data).ok()??))
        })
    }

    fn gnu_build_id(&self, mut notes: NoteIterator<'_, Header>) -> Option<String> {
        while self.budget.work(STEPS_PER_NOTE).is_ok()
            && let Ok(Some(note)) = notes.next()
        {
            if note.name() == b"GNU" && note.n_type(self.endian) == NT_GNU_BUILD_ID {
                let id = note.desc();
                return (1..=MAX_BUILD_ID).contains(&id.len()).then(|| hexadecimal(id));
            }
        }
        None
    }

    /// The budget for reading the file.
    pub(super) fn budget(&self) -> &'a Budget {
        self.budget
    }

    fn find_section(&self, name: &str) -> Option<&'a SectionHeader64<Endianness>> {
        let (_, section) = self.sections.section_by_name(self.endian, name.as_bytes())?;
        (section.sh_type(self.endian) != SHT_NOBITS).then_some(section)
    }

    /// Whether there is a section with this name and with contents.
    pub(super) fn has_section(&self, name: &str) -> bool {
        self.find_section(name).is_some_and(|section| section.sh_size(self.endian) > 0)
    }

    /// The contents of a section, decompressed if necessary. Empty if there is no such section.
    pub(super) fn section(&self, name: &str) -> Result<Cow<'a, [u8]>, String> {
        let Some(section) = self.find_section(name) else { return Ok(Cow::Borrowed(&[])) };
        let outside = || format!("section {name} lies outside the file");
        let Some((compression, offset, size)) = section.compression(self.endian, self.data).map_err(|_| outside())?
        else {
            return section.data(self.endian, self.data).map(Cow::Borrowed).map_err(|_| outside());
        };
        let stored = usize::try_from(offset).ok().zip(usize::try_from(size).ok());
        let stored = stored.and_then(|(offset, size)| self.data.get(offset..offset.checked_add(size)?));
        let stored = stored.ok_or_else(outside)?;
        let expected: u64 = compression.ch_size(self.endian);
        if expected > MAX_DECOMPRESSED {
            return Err(format!(
                "section {name} has {expected} bytes decompressed, more than the limit of {MAX_DECOMPRESSED}"
            ));
        }
        let decompressed = match compression.ch_type(self.endian) {
            ELFCOMPRESS_ZLIB => decompress(flate2::read::ZlibDecoder::new(stored), expected, self.budget),
            ELFCOMPRESS_ZSTD => {
                zstd::Decoder::new(stored).and_then(|decoder| decompress(decoder, expected, self.budget))
            }
            other => return Err(format!("section {name} has the unsupported compression type {other}")),
        };
        decompressed.map(Cow::Owned).map_err(|e| format!("section {name} cannot be decompressed: {e}"))
    }

    /// The first symbol table of a kind: `.dynsym` if `dynamic`, else `.symtab`.
    pub(super) fn symbols(&self, dynamic: bool) -> Result<SymbolTable<'a, Header>, String> {
        let (kind, name) = if dynamic { (SHT_DYNSYM, ".dynsym") } else { (SHT_SYMTAB, ".symtab") };
        self.sections.symbols(self.endian, self.data, kind).map_err(|e| format!("{name} cannot be read: {e}"))
    }

    /// The start and the end address of the section with this index. The end is exclusive.
    pub(super) fn section_range(&self, index: u16) -> Option<(u64, u64)> {
        let section = self.sections.section(object::SectionIndex(index.into())).ok()?;
        let start: u64 = section.sh_addr(self.endian);
        Some((start, start.checked_add(section.sh_size(self.endian))?))
    }

    /// The name and the CRC-32 of the debug file in `.gnu_debuglink`; `None` without one.
    pub(super) fn debug_link(&self) -> Option<(String, u32)> {
        let section = self.section(".gnu_debuglink").ok()?;
        let section = section.get(..section.len().min(MAX_LINK))?;
        let end = section.iter().position(|byte| *byte == 0)?;
        let name = std::str::from_utf8(section.get(..end)?).ok()?.to_owned();
        // The checksum is at the next multiple of four.
        let crc = section.get((end + 4) & !3..)?.first_chunk::<4>()?;
        let crc = if self.endian == Endianness::Little { u32::from_le_bytes(*crc) } else { u32::from_be_bytes(*crc) };
        // The name must be a plain file name, so that it cannot point elsewhere.
        (!name.is_empty() && !name.contains('/')).then_some((name, crc))
    }

    /// The path and the build id of the file in `.gnu_debugaltlink`: what `dwz` moved out of several debug files.
    /// `None` without one.
    pub(super) fn supplementary_link(&self) -> Option<(String, String)> {
        let section = self.section(".gnu_debugaltlink").ok()?;
        let section = section.get(..section.len().min(MAX_LINK))?;
        let end = section.iter().position(|byte| *byte == 0)?;
        let path = std::str::from_utf8(section.get(..end)?).ok()?.to_owned();
        let id = section.get(end + 1..).filter(|id| (1..=MAX_BUILD_ID).contains(&id.len()))?;
        Some((path, hexadecimal(id)))
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decompresses all bytes up to `limit`. The buffer grows as they arrive, so a false size costs no memory. The memory
/// stays charged until the run has been read.
fn decompress_up_to(limit: u64, mut from: impl Read, budget: &Budget) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    loop {
        let chunk = limit.saturating_sub(bytes.len() as u64).min(CHUNK as u64);
        let read = from.by_ref().take(chunk).read_to_end(&mut bytes)?;
        // The buffer has up to twice its length.
        budget.hold(2 * read as u64).and_then(|()| budget.work(read as u64)).map_err(std::io::Error::other)?;
        if read == 0 {
            return Ok(bytes);
        }
    }
}

/// Decompresses exactly `expected` bytes.
fn decompress(from: impl Read, expected: u64, budget: &Budget) -> std::io::Result<Vec<u8>> {
    let bytes = decompress_up_to(expected.saturating_add(1), from, budget)?;
    if bytes.len() as u64 != expected {
        return Err(std::io::Error::other("the length differs from the one in its header"));
    }
    Ok(bytes)
}

/// Decompresses `.gnu_debugdata` ("MiniDebugInfo"): an ELF file in xz format that is used only for its symbol table.
/// `None` without one.
pub(super) fn mini_debug_data(elf: &Elf<'_>) -> Result<Option<Bytes>, String> {
    /// The maximum decompressed size, in bytes. Fedora's largest have a few megabytes.
    const MAX_MINI_DEBUG_DATA: u64 = 256 << 20;
    const MAX_DICTIONARY_KIB: u32 = 128 << 10;
    let compressed = elf.section(".gnu_debugdata")?;
    if compressed.is_empty() {
        return Ok(None);
    }
    let reader = lzma_rust2::XzReader::new_mem_limit(&*compressed, false, MAX_DICTIONARY_KIB);
    let bytes = decompress_up_to(MAX_MINI_DEBUG_DATA, reader, elf.budget)
        .map_err(|e| format!(".gnu_debugdata cannot be decompressed: {e}"))?;
    Ok(Some(Bytes::Owned(bytes)))
}
