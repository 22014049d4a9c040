//! Makes a library that programs load in the place of one of NVIDIA's, from a core. No compiler is needed.
//!
//! The core's file gets a soname, the version definitions that importers ask for, and stubs for functions that it
//! lacks. Without the version definitions the dynamic linker ends the process. Two segments are added to the file, and
//! the old tables stay where they are, unused:
//!
//! - read and execute: the stubs;
//! - read and write: the program headers and the tables of the dynamic section, which the dynamic linker relocates.
//!
//! Symbols keep their numbers, because the core's relocations use them. The hash table is therefore `DT_HASH`, which
//! needs no order of the symbols. A symbol that the library does not export is not in it.

use crate::arch::LARGEST_PAGE;
use crate::core::{Core, Entry, Header, SectionHeader, Segment, Symbol};
use crate::imports::Library;
use crate::stubs;
use anyhow::{Context, Result, ensure};
use object::elf::{self, Verdaux, Verdef};
use object::pod::{bytes_of, bytes_of_slice, from_bytes_mut};
use object::{LittleEndian as LE, U16, U32, U64};
use std::collections::BTreeSet;

/// The function of each core that the stubs jump to.
const STUB: &str = "simcuda_stub";
/// The program headers that are added.
const ADDED_SEGMENTS: usize = 2;
/// A symbol of the hash table that stands for none.
const NO_SYMBOL: u32 = 0;

/// The types of sections that are replaced, or that describe replaced ones.
const REPLACED_SECTIONS: [u32; 7] = [
    elf::SHT_DYNSYM,
    elf::SHT_DYNAMIC,
    elf::SHT_HASH,
    elf::SHT_GNU_HASH,
    elf::SHT_GNU_VERSYM,
    elf::SHT_GNU_VERDEF,
    elf::SHT_GNU_VERNEED,
];

/// Makes the file of `library` from a core. It exports the core's functions that `is_own` selects. `variables` are
/// 32-bit variables of the core and their values.
///
/// Fails when the core lacks such a variable or the function for stubs.
pub(crate) fn make(
    core: &Core,
    library: &Library,
    is_own: impl Fn(&str) -> bool,
    variables: &[(&str, i32)],
) -> Result<Vec<u8>> {
    let mut data = core.data.clone();
    let defined = core.exports();
    for (name, value) in variables {
        let offset = defined.get(name).and_then(|address| core.offset(*address));
        let offset = offset.with_context(|| format!("the core has no variable {name}"))?;
        data[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    }
    let own: BTreeSet<&str> = defined.keys().copied().filter(|name| is_own(name)).collect();
    let stubbed: Vec<&str> = library.names().map(String::as_str).filter(|name| !own.contains(name)).collect();

    let end = core.segments.iter().map(|s| s.p_vaddr.get(LE) + s.p_memsz.get(LE)).max().unwrap_or(0);
    let mut code = Place::after(&mut data, end);
    let target = defined.get(STUB).copied();
    ensure!(target.is_some() || stubbed.is_empty(), "the core has no function {STUB}");
    let (text, stubs) = stubs::assemble(&stubbed, code.address, target.unwrap_or(0));
    code.bytes = text.len() as u64;
    data.extend(&text);

    let start = Place::after(&mut data, code.address + code.bytes);
    let mut tables = Tables { start, bytes: Vec::new(), strings: core.strings.clone() };
    let mut segments = core.segments.clone();
    let headers = tables.put(&vec![0; (segments.len() + ADDED_SEGMENTS) * size_of::<Segment>()]);
    let versions = Versions::new(core, library, &mut tables);

    let mut symbols = core.symbols.clone();
    let mut indexes = core.versions.clone();
    let mut names: Vec<&str> = Vec::new();
    for (symbol, index) in symbols.iter().zip(&mut indexes) {
        let name = core.name(symbol);
        let is_defined = symbol.st_shndx.get(LE) != elf::SHN_UNDEF;
        let is_exported = is_defined && own.contains(name);
        if is_exported {
            *index = versions.index(name);
        }
        names.push(if is_exported { name } else { "" });
    }
    for stub in &stubs {
        symbols.push(Symbol {
            st_name: U32::new(LE, tables.string(stub.name)),
            st_info: elf::STB_GLOBAL << 4 | elf::STT_FUNC,
            st_other: elf::STV_DEFAULT,
            st_shndx: U16::new(LE, core.sections.len() as u16),
            st_value: U64::new(LE, stub.address),
            st_size: U64::new(LE, stub.size),
        });
        indexes.push(versions.index(stub.name));
        names.push(stub.name);
    }
    let [soname, beside] = [&library.soname, "$ORIGIN"].map(|text| tables.string(text));
    let strings = tables.put(&tables.strings.clone());
    let symbols = tables.put(bytes_of_slice(&symbols));
    let versym = tables.put(&indexes.iter().flat_map(|index| index.to_le_bytes()).collect::<Vec<u8>>());
    let verdef = tables.put(&versions.definitions);
    let hash = tables.put(&hash_table(&names));
    let replaced = [
        (elf::DT_STRTAB, strings.address),
        (elf::DT_STRSZ, strings.bytes),
        (elf::DT_SYMTAB, symbols.address),
        (elf::DT_VERSYM, versym.address),
        (elf::DT_VERDEF, verdef.address),
        (elf::DT_VERDEFNUM, versions.count),
        (elf::DT_HASH, hash.address),
        (elf::DT_SONAME, u64::from(soname)),
        (elf::DT_RUNPATH, u64::from(beside)),
    ];
    let dropped: Vec<u64> = replaced.iter().map(|(tag, _)| *tag).chain([elf::DT_GNU_HASH]).map(u64::from).collect();
    let mut dynamic = core.dynamic.clone();
    dynamic.retain(|entry| !dropped.contains(&entry.d_tag.get(LE)));
    for (tag, value) in replaced.into_iter().chain([(elf::DT_NULL, 0)]) {
        dynamic.push(Entry { d_tag: U64::new(LE, u64::from(tag)), d_val: U64::new(LE, value) });
    }
    let dynamic = tables.put(bytes_of_slice(&dynamic));

    for segment in &mut segments {
        match segment.p_type.get(LE) {
            elf::PT_DYNAMIC => *segment = dynamic.segment(elf::PT_DYNAMIC, elf::PF_R | elf::PF_W),
            elf::PT_PHDR => *segment = headers.segment(elf::PT_PHDR, elf::PF_R | elf::PF_W),
            _ => {}
        }
    }
    // Loaded segments are in the order of their addresses.
    let last = segments.iter().rposition(|s| s.p_type.get(LE) == elf::PT_LOAD).map_or(0, |last| last + 1);
    let all = Place { bytes: tables.bytes.len() as u64, ..start };
    let added = [code.segment(elf::PT_LOAD, elf::PF_R | elf::PF_X), all.segment(elf::PT_LOAD, elf::PF_R | elf::PF_W)];
    segments.splice(last..last, added);
    let headers = bytes_of_slice(&segments);
    tables.bytes[..headers.len()].copy_from_slice(headers);
    data.extend(&tables.bytes);

    let (address, bytes, needed_count) = core.needed_versions()?;
    let needed = Place { offset: core.offset(address).unwrap_or(0) as u64, address, bytes };
    // Added behind the core's sections, which keep their numbers.
    let first = core.sections.len() as u32;
    let (of_strings, of_symbols) = (first + 1, first + 2);
    let added = [
        (".stubs", elf::SHT_PROGBITS, code, 0, 0, 0),
        (".dynstr", elf::SHT_STRTAB, strings, 0, 0, 0),
        (".dynsym", elf::SHT_DYNSYM, symbols, of_strings, 1, size_of::<Symbol>()),
        (".gnu.version", elf::SHT_GNU_VERSYM, versym, of_symbols, 0, size_of::<u16>()),
        (".gnu.version_d", elf::SHT_GNU_VERDEF, verdef, of_strings, versions.count as u32, 0),
        (".gnu.version_r", elf::SHT_GNU_VERNEED, needed, of_strings, needed_count, 0),
        (".hash", elf::SHT_HASH, hash, of_symbols, 0, size_of::<u32>()),
        (".dynamic", elf::SHT_DYNAMIC, dynamic, of_strings, 0, size_of::<Entry>()),
    ];
    let mut sections = core.sections.clone();
    let is_replaced = |section: &&mut SectionHeader| {
        let (kind, flags) = (section.sh_type.get(LE), section.sh_flags.get(LE));
        // Of the string tables, the loaded one is that of the dynamic section.
        REPLACED_SECTIONS.contains(&kind) || kind == elf::SHT_STRTAB && flags & u64::from(elf::SHF_ALLOC) != 0
    };
    for section in sections.iter_mut().filter(is_replaced) {
        section.sh_type = U32::new(LE, elf::SHT_PROGBITS);
        section.sh_link = U32::new(LE, 0);
        section.sh_info = U32::new(LE, 0);
        section.sh_entsize = U64::new(LE, 0);
        section.sh_name = U32::new(LE, 0);
    }
    for section in sections.iter_mut().filter(|section| section.sh_type.get(LE) == elf::SHT_RELA) {
        section.sh_link = U32::new(LE, of_symbols);
    }
    let mut section_names = core.section_names.clone();
    let mut add = |name: &str, kind: u32, flags: u32, place: Place, link: u32, info: u32, entry: usize| {
        sections.push(SectionHeader {
            sh_name: U32::new(LE, section_names.len() as u32),
            sh_type: U32::new(LE, kind),
            sh_flags: U64::new(LE, u64::from(flags)),
            sh_addr: U64::new(LE, place.address),
            sh_offset: U64::new(LE, place.offset),
            sh_size: U64::new(LE, place.bytes),
            sh_link: U32::new(LE, link),
            sh_info: U32::new(LE, info),
            sh_addralign: U64::new(LE, 1),
            sh_entsize: U64::new(LE, entry as u64),
        });
        section_names.extend(name.as_bytes());
        section_names.push(0);
    };
    for (name, kind, place, link, info, entry) in added {
        let flags = if kind == elf::SHT_PROGBITS { elf::SHF_ALLOC | elf::SHF_EXECINSTR } else { elf::SHF_ALLOC };
        add(name, kind, flags, place, link, info, entry);
    }
    add(".shstrtab", elf::SHT_STRTAB, 0, Place { offset: data.len() as u64, address: 0, bytes: 0 }, 0, 0, 0);
    let names = sections.len() - 1;
    sections[names].sh_size = U64::new(LE, section_names.len() as u64);
    data.extend(&section_names);
    data.resize(data.len().next_multiple_of(8), 0);
    let section_headers = data.len() as u64;
    data.extend(bytes_of_slice(&sections));
    let (header, _) = from_bytes_mut::<Header>(&mut data).ok().context("not an ELF file")?;
    header.e_phoff = U64::new(LE, start.offset);
    header.e_phnum = U16::new(LE, segments.len() as u16);
    header.e_shoff = U64::new(LE, section_headers);
    header.e_shentsize = U16::new(LE, size_of::<SectionHeader>() as u16);
    header.e_shnum = U16::new(LE, sections.len() as u16);
    header.e_shstrndx = U16::new(LE, names as u16);
    Ok(data)
}

/// A place in the file and in memory.
#[derive(Clone, Copy)]
struct Place {
    offset: u64,
    address: u64,
    bytes: u64,
}

impl Place {
    /// The first page after the end of the file and after an address, still empty. Its offset is its address, because
    /// programs look for the program headers at the offset that the ELF header in memory has.
    fn after(data: &mut Vec<u8>, address: u64) -> Self {
        let at = address.max(data.len() as u64).next_multiple_of(LARGEST_PAGE);
        data.resize(at as usize, 0);
        Place { offset: at, address: at, bytes: 0 }
    }

    fn segment(self, kind: u32, flags: u32) -> Segment {
        Segment {
            p_type: U32::new(LE, kind),
            p_flags: U32::new(LE, flags),
            p_offset: U64::new(LE, self.offset),
            p_vaddr: U64::new(LE, self.address),
            p_paddr: U64::new(LE, self.address),
            p_filesz: U64::new(LE, self.bytes),
            p_memsz: U64::new(LE, self.bytes),
            p_align: U64::new(LE, if kind == elf::PT_LOAD { LARGEST_PAGE } else { 8 }),
        }
    }
}

/// The new tables, one after another.
struct Tables {
    start: Place,
    bytes: Vec<u8>,
    strings: Vec<u8>,
}

impl Tables {
    /// Adds a table.
    fn put(&mut self, table: &[u8]) -> Place {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        let inside = self.bytes.len() as u64;
        self.bytes.extend(table);
        Place { offset: self.start.offset + inside, address: self.start.address + inside, bytes: table.len() as u64 }
    }

    /// Adds a string, and returns its offset.
    fn string(&mut self, text: &str) -> u32 {
        let offset = self.strings.len() as u32;
        self.strings.extend(text.as_bytes());
        self.strings.push(0);
        offset
    }
}

/// The version definitions of a library.
struct Versions<'a> {
    library: &'a Library,
    /// The index of the first version. The core's own imports use those before it.
    first: u16,
    /// The table of `DT_VERDEF`.
    definitions: Vec<u8>,
    /// The number of definitions, with that of the library itself.
    count: u64,
}

impl<'a> Versions<'a> {
    fn new(core: &Core, library: &'a Library, tables: &mut Tables) -> Self {
        // The topmost bit hides a symbol.
        let used = core.versions.iter().map(|index| index & 0x7fff).max().unwrap_or(0);
        let first = used.max(elf::VER_NDX_GLOBAL) + 1;
        let named = library.version_names().zip(first..).map(|(name, index)| (name, index, 0));
        let all: Vec<(&str, u16, u16)> =
            [(library.soname.as_str(), elf::VER_NDX_GLOBAL, elf::VER_FLG_BASE)].into_iter().chain(named).collect();
        let mut definitions = Vec::new();
        for (number, (name, index, flags)) in all.iter().enumerate() {
            let size = (size_of::<Verdef<LE>>() + size_of::<Verdaux<LE>>()) as u32;
            definitions.extend(bytes_of(&Verdef::<LE> {
                vd_version: U16::new(LE, elf::VER_DEF_CURRENT),
                vd_flags: U16::new(LE, *flags),
                vd_ndx: U16::new(LE, *index),
                vd_cnt: U16::new(LE, 1),
                vd_hash: U32::new(LE, elf::hash(name.as_bytes())),
                vd_aux: U32::new(LE, size_of::<Verdef<LE>>() as u32),
                vd_next: U32::new(LE, if number + 1 == all.len() { 0 } else { size }),
            }));
            let name = U32::new(LE, tables.string(name));
            definitions.extend(bytes_of(&Verdaux::<LE> { vda_name: name, vda_next: U32::new(LE, 0) }));
        }
        Versions { library, first, definitions, count: all.len() as u64 }
    }

    /// The version index of an exported name. A name that nobody imports with a version gets the first one, because
    /// programs may look it up.
    fn index(&self, name: &str) -> u16 {
        if self.library.version_names().next().is_none() {
            return elf::VER_NDX_GLOBAL;
        }
        let position = self.library.version_names().position(|version| self.library.versions[version].contains(name));
        self.first + position.unwrap_or(0) as u16
    }
}

/// A `DT_HASH` table. It leaves out symbols with an empty name.
fn hash_table(names: &[&str]) -> Vec<u8> {
    let buckets = (names.len() / 2).max(1);
    let mut heads = vec![NO_SYMBOL; buckets];
    let mut chains = vec![NO_SYMBOL; names.len()];
    for (number, name) in names.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
        let head = &mut heads[elf::hash(name.as_bytes()) as usize % buckets];
        chains[number] = std::mem::replace(head, number as u32);
    }
    let words = [buckets as u32, names.len() as u32].into_iter().chain(heads).chain(chains);
    words.flat_map(u32::to_le_bytes).collect()
}
