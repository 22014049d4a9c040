//! Reads one ELF file in place from a mapping: its identity, its debug sections, its symbol tables.
//!
//! The file's content is not trusted. An unreadable part is an error of that part alone. Sizes that the file claims
//! never decide how much memory is allocated.

use std::borrow::Cow;
use std::io::Read;
use std::ops::Deref;
use std::path::Path;

use memtrace_trace::file::untrusted;
use object::Endianness;
use object::elf::{
    ELFCOMPRESS_ZLIB, ELFCOMPRESS_ZSTD, FileHeader64, NT_GNU_BUILD_ID, PT_NOTE, SHT_DYNSYM, SHT_NOBITS, SHT_SYMTAB,
    SectionHeader64,
};
use object::read::elf::{CompressionHeader, FileHeader, NoteIterator, ProgramHeader, SectionHeader};
use object::read::elf::{SectionTable, SymbolTable};

/// The maximum decompressed size of a section, in bytes.
const MAX_DECOMPRESSED: u64 = 2 << 30;
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
    /// Maps a regular file. The error is a text.
    pub(super) fn map(path: &Path) -> Result<Bytes, String> {
        let file = untrusted::open(path).map_err(|e| io_reason(&e))?;
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
    data: &'a [u8],
    header: &'a Header,
    endian: Endianness,
    sections: SectionTable<'a, Header>,
    has_section_table: bool,
}

impl<'a> Elf<'a> {
    /// Parses the headers. A truncated file without its section table still has its identity.
    pub(super) fn parse(data: &'a [u8]) -> Result<Elf<'a>, String> {
        let header = Header::parse(data).map_err(|_| "is not a 64-bit ELF file".to_owned())?;
        let endian = header.endian().map_err(|e| e.to_string())?;
        let sections = header.sections(endian, data);
        Ok(Elf { data, header, endian, has_section_table: sections.is_ok(), sections: sections.unwrap_or_default() })
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
        let in_sections = self
            .sections
            .iter()
            .find_map(|section| gnu_build_id(self.endian, section.notes(self.endian, self.data).ok()??));
        in_sections.or_else(|| {
            let segments = self.header.program_headers(self.endian, self.data).ok()?;
            segments
                .iter()
                .filter(|segment| segment.p_type(self.endian) == PT_NOTE)
                .find_map(|segment| gnu_build_id(self.endian, segment.notes(self.endian, self.data).ok()??))
        })
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
            ELFCOMPRESS_ZLIB => decompress(flate2::read::ZlibDecoder::new(stored), expected),
            ELFCOMPRESS_ZSTD => zstd::Decoder::new(stored).and_then(|decoder| decompress(decoder, expected)),
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
        let end = section.iter().position(|byte| *byte == 0)?;
        let path = std::str::from_utf8(section.get(..end)?).ok()?.to_owned();
        let id = section.get(end + 1..).filter(|id| (1..=MAX_BUILD_ID).contains(&id.len()))?;
        Some((path, hexadecimal(id)))
    }
}

fn gnu_build_id(endian: Endianness, mut notes: NoteIterator<'_, Header>) -> Option<String> {
    while let Ok(Some(note)) = notes.next() {
        if note.name() == b"GNU" && note.n_type(endian) == NT_GNU_BUILD_ID {
            let id = note.desc();
            return (1..=MAX_BUILD_ID).contains(&id.len()).then(|| hexadecimal(id));
        }
    }
    None
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decompresses exactly `expected` bytes. The buffer grows as they arrive, so a false size costs no memory.
fn decompress(from: impl Read, expected: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(expected.saturating_add(1)).read_to_end(&mut bytes)?;
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
    let mut bytes = Vec::new();
    let reader = lzma_rust2::XzReader::new_mem_limit(&*compressed, false, MAX_DICTIONARY_KIB);
    reader
        .take(MAX_MINI_DEBUG_DATA)
        .read_to_end(&mut bytes)
        .map_err(|e| format!(".gnu_debugdata cannot be decompressed: {e}"))?;
    Ok(Some(Bytes::Owned(bytes)))
}
