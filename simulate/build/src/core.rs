//! Reads a core: a shared library with the functions of a part of CUDA, as cargo built it.

use crate::arch;
use anyhow::{Context, Result, ensure};
use object::elf::{self, Dyn64, FileHeader64, ProgramHeader64, SectionHeader64, Sym64, Vernaux, Verneed};
use object::{LittleEndian as LE, pod};
use std::collections::BTreeMap;

pub(crate) type Header = FileHeader64<LE>;
pub(crate) type Segment = ProgramHeader64<LE>;
pub(crate) type Entry = Dyn64<LE>;
pub(crate) type Symbol = Sym64<LE>;
pub(crate) type SectionHeader = SectionHeader64<LE>;

/// A shared library and its dynamic tables.
#[derive(Clone, Debug)]
pub(crate) struct Core {
    /// The whole file.
    pub(crate) data: Vec<u8>,
    /// The program headers.
    pub(crate) segments: Vec<Segment>,
    /// The dynamic section, without the terminating entry.
    pub(crate) dynamic: Vec<Entry>,
    /// The dynamic symbols, in their order: relocations name them by their number.
    pub(crate) symbols: Vec<Symbol>,
    /// The version index of each symbol.
    pub(crate) versions: Vec<u16>,
    /// The strings of the dynamic tables.
    pub(crate) strings: Vec<u8>,
    /// The section headers. Symbols name sections by their number.
    pub(crate) sections: Vec<SectionHeader>,
    /// The names of the sections.
    pub(crate) section_names: Vec<u8>,
}

impl Core {
    /// Reads a core. Fails when the file is not a shared library of this architecture with the usual dynamic tables.
    pub(crate) fn read(data: Vec<u8>) -> Result<Self> {
        let (header, _) = pod::from_bytes::<Header>(&data).ok().context("not an ELF file")?;
        ensure!(
            header.e_ident.magic == elf::ELFMAG && header.e_machine.get(LE) == arch::MACHINE,
            "no ELF file of {}",
            arch::NAME
        );
        let (offset, count) = (header.e_phoff.get(LE) as usize, header.e_phnum.get(LE) as usize);
        let segments = table::<Segment>(&data, offset, count)?.to_vec();
        let dynamic = segments.iter().find(|s| s.p_type.get(LE) == elf::PT_DYNAMIC).context("no dynamic section")?;
        let (offset, bytes) = (dynamic.p_offset.get(LE) as usize, dynamic.p_filesz.get(LE) as usize);
        let mut dynamic = table::<Entry>(&data, offset, bytes / size_of::<Entry>())?.to_vec();
        dynamic.truncate(dynamic.iter().position(|e| e.d_tag.get(LE) == 0).unwrap_or(dynamic.len()));
        let (offset, count) = (header.e_shoff.get(LE) as usize, header.e_shnum.get(LE) as usize);
        let sections = table::<SectionHeader>(&data, offset, count)?.to_vec();
        let names = sections.get(usize::from(header.e_shstrndx.get(LE))).context("no names of sections")?;
        let (offset, bytes) = (names.sh_offset.get(LE) as usize, names.sh_size.get(LE) as usize);
        let section_names = table::<u8>(&data, offset, bytes)?.to_vec();
        let (symbols, versions, strings) = (Vec::new(), Vec::new(), Vec::new());
        let mut core = Core { data, segments, dynamic, symbols, versions, strings, sections, section_names };
        let at = |tag: u32| {
            core.value(tag).and_then(|address| core.offset(address)).with_context(|| format!("no table {tag:#x}"))
        };
        let (strings, symbols) = (at(elf::DT_STRTAB)?, at(elf::DT_SYMTAB)?);
        let length = core.value(elf::DT_STRSZ).context("no DT_STRSZ")? as usize;
        let count = count_of(&core.data, at(elf::DT_GNU_HASH)?)?;
        let versions = at(elf::DT_VERSYM)?;
        core.strings = core.data.get(strings..strings + length).context("strings outside the file")?.to_vec();
        core.symbols = table::<Symbol>(&core.data, symbols, count)?.to_vec();
        core.versions = table::<[u8; 2]>(&core.data, versions, count)?.iter().map(|v| u16::from_le_bytes(*v)).collect();
        Ok(core)
    }

    /// The value of an entry of the dynamic section.
    pub(crate) fn value(&self, tag: u32) -> Option<u64> {
        self.dynamic.iter().find(|e| e.d_tag.get(LE) == u64::from(tag)).map(|e| e.d_val.get(LE))
    }

    /// The offset in the file of an address.
    pub(crate) fn offset(&self, address: u64) -> Option<usize> {
        let loaded = self.segments.iter().filter(|s| s.p_type.get(LE) == elf::PT_LOAD);
        let mut found = loaded.filter_map(|s| {
            let inside = address.checked_sub(s.p_vaddr.get(LE)).filter(|inside| *inside < s.p_filesz.get(LE))?;
            Some((s.p_offset.get(LE) + inside) as usize)
        });
        found.next()
    }

    /// The address, the size in bytes and the number of entries of the table of needed versions.
    pub(crate) fn needed_versions(&self) -> Result<(u64, u64, u32)> {
        let (address, count) = (self.value(elf::DT_VERNEED), self.value(elf::DT_VERNEEDNUM));
        let (address, count) = (address.context("no needed versions")?, count.context("no needed versions")?);
        let start = self.offset(address).context("needed versions outside the file")?;
        let (mut at, mut end) = (start, start);
        for _ in 0..count {
            let entry = table::<Verneed<LE>>(&self.data, at, 1)?[0];
            let names = usize::from(entry.vn_cnt.get(LE)) * size_of::<Vernaux<LE>>();
            end = end.max(at + entry.vn_aux.get(LE) as usize + names);
            at += entry.vn_next.get(LE) as usize;
        }
        Ok((address, (end - start) as u64, count as u32))
    }

    /// The name of a symbol.
    pub(crate) fn name(&self, symbol: &Symbol) -> &str {
        let rest = self.strings.get(symbol.st_name.get(LE) as usize..).unwrap_or_default();
        std::str::from_utf8(rest.split(|byte| *byte == 0).next().unwrap_or_default()).unwrap_or_default()
    }

    /// The addresses of what the core exports, by name.
    pub(crate) fn exports(&self) -> BTreeMap<&str, u64> {
        let defined = self.symbols.iter().filter(|s| s.st_shndx.get(LE) != elf::SHN_UNDEF);
        defined.map(|s| (self.name(s), s.st_value.get(LE))).collect()
    }
}

fn table<T: pod::Pod>(data: &[u8], offset: usize, count: usize) -> Result<&[T]> {
    let rest = data.get(offset..).context("a table outside the file")?;
    Ok(pod::slice_from_bytes(rest, count).ok().context("a table outside the file")?.0)
}

/// The number of symbols that a `DT_GNU_HASH` table implies: those without a hash, and the chains.
fn count_of(data: &[u8], offset: usize) -> Result<usize> {
    let word = |index: usize| -> Result<u32> {
        let bytes = data.get(offset + 4 * index..offset + 4 * index + 4).context("a hash table outside the file")?;
        Ok(u32::from_le_bytes(bytes.try_into()?))
    };
    let (buckets, first, filter) = (word(0)? as usize, word(1)?, word(2)? as usize);
    let chains = 4 + 2 * filter + buckets;
    let mut last = 0;
    for bucket in 0..buckets {
        last = last.max(word(4 + 2 * filter + bucket)?);
    }
    if last < first {
        return Ok(first as usize);
    }
    // The lowest bit is set in the last word of a chain.
    while word(chains + (last - first) as usize)? & 1 == 0 {
        last += 1;
    }
    Ok(last as usize + 1)
}
