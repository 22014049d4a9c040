//! Looks up symbols in the tables of loaded objects, by the rules of `dlsym` (glibc's elf/dl-lookup.c, musl's
//! ldso/dynlink.c).
//!
//! - A name without a version means the default version. Hidden versions are skipped.
//! - Undefined, local, hidden and internal symbols are skipped. An undefined function of an executable that is not
//!   position-independent has an address, that of its stub. `dlsym` returns it; this module does not, because the stub
//!   leads to our own function.
//! - The address of an indirect function (`STT_GNU_IFUNC`) is what its resolver returns.
//! - Thread-local variables have no address here. Nobody looks one up.
//!
//! Constraint: no function here allocates memory or makes a system call, except
//! [`symbol_of_object_and_dependencies`] and [`Reading::library`].

use std::ffi::CStr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::arch;
use super::objects::LoadedObject;
use super::reading::Reading;

/// A symbol's name with its hashes.
#[derive(Clone, Copy)]
pub struct SymbolName<'a> {
    name: &'a [u8],
    gnu_hash: u32,
    sysv_hash: u32,
}

impl<'a> SymbolName<'a> {
    /// A name without a NUL.
    pub fn new(name: &'a [u8]) -> SymbolName<'a> {
        let gnu_hash = name.iter().fold(5381, |hash: u32, byte| hash.wrapping_mul(33).wrapping_add((*byte).into()));
        // The generic ABI's function for `DT_HASH`.
        let sysv_hash = name.iter().fold(0, |hash: u32, byte| {
            let hash = (hash << 4).wrapping_add((*byte).into());
            let high = hash & 0xf000_0000;
            (hash ^ high >> 24) & !high
        });
        SymbolName { name, gnu_hash, sysv_hash }
    }
}

/// The tables of one object. An address of 0 means that there is no such table.
pub(super) struct Tables {
    bias: usize,
    strings: usize,
    strings_size: usize,
    symbols: usize,
    /// `DT_GNU_HASH`.
    gnu_hash: usize,
    /// `DT_HASH`.
    sysv_hash: usize,
    /// `DT_VERSYM`: a version index for each symbol.
    versions: usize,
    /// The offset of the library's name in the string table.
    soname: Option<usize>,
}

/// A symbol that an object defines.
struct Definition {
    address: usize,
    /// In bytes.
    size: usize,
    is_indirect: bool,
}

impl Definition {
    /// The address that a program gets.
    fn resolve(&self) -> usize {
        if !self.is_indirect {
            return self.address;
        }
        // SAFETY: the address of an `STT_GNU_IFUNC` symbol is that of a resolver. It may be called once the object is
        // relocated, which is so for every object that a program can look up.
        unsafe { arch::resolve_indirect(self.address) }
    }
}

impl Tables {
    /// The tables of an object. `None` if it has no symbols.
    pub(super) fn of(reading: &Reading, object: &LoadedObject) -> Option<Tables> {
        const DT_HASH: i64 = 4;
        const DT_STRTAB: i64 = 5;
        const DT_SYMTAB: i64 = 6;
        const DT_STRSZ: i64 = 10;
        const DT_SONAME: i64 = 14;
        const DT_GNU_HASH: i64 = 0x6fff_fef5;
        const DT_VERSYM: i64 = 0x6fff_fff0;
        let mut tables = Tables {
            bias: object.bias,
            strings: 0,
            strings_size: 0,
            symbols: 0,
            gnu_hash: 0,
            sysv_hash: 0,
            versions: 0,
            soname: None,
        };
        object.for_each_dynamic(reading, |tag, value, address| match tag {
            DT_HASH => tables.sysv_hash = address,
            DT_STRTAB => tables.strings = address,
            DT_SYMTAB => tables.symbols = address,
            DT_STRSZ => tables.strings_size = value,
            DT_SONAME => tables.soname = Some(value),
            DT_GNU_HASH => tables.gnu_hash = address,
            DT_VERSYM => tables.versions = address,
            _ => {}
        });
        let has_hash = tables.gnu_hash != 0 || tables.sysv_hash != 0;
        (tables.strings != 0 && tables.symbols != 0 && has_hash).then_some(tables)
    }

    /// The lowest address of a table.
    pub(super) fn lowest_address(&self) -> usize {
        let tables = [self.strings, self.symbols, self.gnu_hash, self.sysv_hash];
        tables.into_iter().filter(|address| *address != 0).min().unwrap_or(0)
    }

    /// Whether the library's own name (`DT_SONAME`) is `name`.
    pub(super) fn has_soname(&self, reading: &Reading, name: &[u8]) -> bool {
        self.soname.is_some_and(|offset| self.is_string(reading, offset, name))
    }

    fn is_string(&self, reading: &Reading, offset: usize, text: &[u8]) -> bool {
        offset < self.strings_size && reading.is_c_string(self.strings + offset, text)
    }

    fn symbol(&self, reading: &Reading, index: usize) -> Option<libc::Elf64_Sym> {
        reading.read(self.symbols + index * size_of::<libc::Elf64_Sym>())
    }

    /// The definition of a name.
    fn find(&self, reading: &Reading, name: &SymbolName<'_>) -> Option<Definition> {
        if self.gnu_hash != 0 { self.find_in_gnu_hash(reading, name) } else { self.find_in_sysv_hash(reading, name) }
    }

    fn find_in_gnu_hash(&self, reading: &Reading, name: &SymbolName<'_>) -> Option<Definition> {
        let (table, hash) = (GnuHash::read(reading, self.gnu_hash)?, name.gnu_hash);
        if table.buckets == 0 || table.filter_words == 0 {
            return None;
        }
        let filter: u64 = reading.read(table.filter + hash as usize / 64 % table.filter_words * 8)?;
        if filter >> (hash % 64) & filter >> (hash.checked_shr(table.filter_shift).unwrap_or(0) % 64) & 1 == 0 {
            return None;
        }
        let bucket = table.bucket_words + hash as usize % table.buckets * 4;
        let mut index = reading.read::<u32>(bucket)? as usize;
        while index >= table.first {
            let link = table.link(reading, index)?;
            if link | 1 == hash | 1
                && let Some(found) = self.definition(reading, index, name.name)
            {
                return Some(found);
            }
            if link & 1 != 0 {
                break;
            }
            index += 1;
        }
        None
    }

    fn find_in_sysv_hash(&self, reading: &Reading, name: &SymbolName<'_>) -> Option<Definition> {
        let word = |index: usize| reading.read::<u32>(self.sysv_hash + index * 4).map(|word| word as usize);
        let (buckets, chains) = (word(0)?, word(1)?);
        if buckets == 0 {
            return None;
        }
        let mut index = word(2 + name.sysv_hash as usize % buckets)?;
        // A chain has at most as many links as there are symbols.
        for _ in 0..chains {
            if index == 0 {
                break;
            }
            if let Some(found) = self.definition(reading, index, name.name) {
                return Some(found);
            }
            index = word(2 + buckets + index)?;
        }
        None
    }

    /// Symbol `index`, if it defines `name` for other objects.
    fn definition(&self, reading: &Reading, index: usize, name: &[u8]) -> Option<Definition> {
        /// `VERSYM_HIDDEN` of elf.h.
        const HIDDEN_VERSION: u16 = 0x8000;
        let symbol = self.symbol(reading, index)?;
        let found = self.exported(&symbol)?;
        if !self.is_string(reading, symbol.st_name as usize, name) {
            return None;
        }
        if self.versions != 0 && reading.read::<u16>(self.versions + index * 2)? & HIDDEN_VERSION != 0 {
            return None;
        }
        Some(found)
    }

    /// The definition that a symbol gives to other objects.
    fn exported(&self, symbol: &libc::Elf64_Sym) -> Option<Definition> {
        const SHN_UNDEF: u16 = 0;
        const SHN_ABS: u16 = 0xfff1;
        const STB_LOCAL: u8 = 0;
        const STT_SECTION: u8 = 3;
        const STT_FILE: u8 = 4;
        const STT_TLS: u8 = 6;
        const STT_GNU_IFUNC: u8 = 10;
        const STV_INTERNAL: u8 = 1;
        const STV_HIDDEN: u8 = 2;
        let (binding, kind) = (symbol.st_info >> 4, symbol.st_info & 15);
        let is_defined = symbol.st_shndx != SHN_UNDEF && (symbol.st_value != 0 || symbol.st_shndx == SHN_ABS);
        let is_exported = binding != STB_LOCAL && !matches!(symbol.st_other & 3, STV_INTERNAL | STV_HIDDEN);
        if !is_defined || !is_exported || matches!(kind, STT_SECTION | STT_FILE | STT_TLS) {
            return None;
        }
        let bias = if symbol.st_shndx == SHN_ABS { 0 } else { self.bias };
        let address = bias.wrapping_add(symbol.st_value as usize);
        Some(Definition { address, size: symbol.st_size as usize, is_indirect: kind == STT_GNU_IFUNC })
    }

    /// The range of the indices of all symbols, and of those that other objects define.
    fn counts(&self, reading: &Reading) -> Option<(usize, usize)> {
        if self.gnu_hash == 0 {
            let count = reading.read::<u32>(self.sysv_hash + 4)? as usize;
            return Some((count, count));
        }
        let table = GnuHash::read(reading, self.gnu_hash)?;
        let mut last = 0;
        for bucket in 0..table.buckets {
            last = last.max(reading.read::<u32>(table.bucket_words + bucket * 4)? as usize);
        }
        if last < table.first {
            return Some((table.first, table.first));
        }
        while table.link(reading, last)? & 1 == 0 {
            last += 1;
        }
        Some((last + 1, table.first))
    }
}

/// A `DT_GNU_HASH` table: four words of header, the filter, the buckets and the chains. Bit 0 is set in the last word
/// of each chain.
struct GnuHash {
    buckets: usize,
    /// The index of the first symbol that the table covers. Those before are defined by other objects.
    first: usize,
    /// The number of the filter's words, of 8 bytes each.
    filter_words: usize,
    filter_shift: u32,
    /// The addresses of the filter and of the buckets.
    filter: usize,
    bucket_words: usize,
}

impl GnuHash {
    fn read(reading: &Reading, table: usize) -> Option<GnuHash> {
        let [buckets, first, filter_words, filter_shift] = reading.read::<[u32; 4]>(table)?;
        let filter = table + 16;
        let bucket_words = filter + filter_words as usize * 8;
        Some(GnuHash {
            buckets: buckets as usize,
            first: first as usize,
            filter_words: filter_words as usize,
            filter_shift,
            filter,
            bucket_words,
        })
    }

    /// The word of the chains for symbol `index`, which is not below `first`.
    fn link(&self, reading: &Reading, index: usize) -> Option<u32> {
        reading.read(self.bucket_words + (self.buckets + index.checked_sub(self.first)?) * 4)
    }
}

impl LoadedObject {
    /// The address of the symbol that this object exports by this name. `None` if there is none.
    pub fn symbol(&self, reading: &Reading, name: &SymbolName<'_>) -> Option<usize> {
        Tables::of(reading, self)?.find(reading, name).map(|definition| definition.resolve())
    }

    /// The addresses of the function that this object exports by this name. `None` if there is none.
    pub fn function(&self, reading: &Reading, name: &SymbolName<'_>) -> Option<Range<usize>> {
        let definition = Tables::of(reading, self)?.find(reading, name).filter(|found| !found.is_indirect)?;
        Some(definition.address..definition.address.checked_add(definition.size)?)
    }

    /// The address of the first exported symbol whose name begins with `prefix`. For C++ functions whose parameters
    /// differ between versions. Searches the symbol table linearly.
    pub fn symbol_with_prefix(&self, reading: &Reading, prefix: &[u8]) -> Option<usize> {
        let tables = Tables::of(reading, self)?;
        let (count, _) = tables.counts(reading)?;
        (0..count).find_map(|index| {
            let symbol = tables.symbol(reading, index)?;
            let found = tables.exported(&symbol)?;
            let starts = reading
                .with_c_string(tables.strings + symbol.st_name as usize, |name| name.to_bytes().starts_with(prefix));
            starts.then(|| found.resolve())
        })
    }

    /// Calls `visit` with the index and the name of each symbol that this object takes from others.
    pub fn for_each_import(&self, reading: &Reading, mut visit: impl FnMut(usize, &[u8])) {
        const SHN_UNDEF: u16 = 0;
        let Some(tables) = Tables::of(reading, self) else { return };
        let Some((_, imports)) = tables.counts(reading) else { return };
        for index in 1..imports {
            let Some(symbol) = tables.symbol(reading, index) else { return };
            if symbol.st_shndx == SHN_UNDEF && (symbol.st_name as usize) < tables.strings_size {
                reading.with_c_string(tables.strings + symbol.st_name as usize, |name| visit(index, name.to_bytes()));
            }
        }
    }

    /// Calls `visit` with the address of the slot and the name of each function that this object calls through its
    /// table of procedures, its own functions included.
    pub fn for_each_called(&self, reading: &Reading, mut visit: impl FnMut(usize, &[u8])) {
        const DT_PLTRELSZ: i64 = 2;
        const DT_JMPREL: i64 = 23;
        let Some(tables) = Tables::of(reading, self) else { return };
        let (mut table, mut size) = (0, 0);
        self.for_each_dynamic(reading, |tag, value, address| match tag {
            DT_JMPREL => table = address,
            DT_PLTRELSZ => size = value,
            _ => {}
        });
        if table == 0 {
            return;
        }
        for index in 0..size / size_of::<libc::Elf64_Rela>() {
            let Some(entry) = reading.relocation(table, index) else { return };
            let Some(symbol) = tables.symbol(reading, (entry.r_info >> 32) as usize) else { return };
            if entry.r_info as u32 == arch::R_JUMP_SLOT && (symbol.st_name as usize) < tables.strings_size {
                let slot = self.bias.wrapping_add(entry.r_offset as usize);
                reading.with_c_string(tables.strings + symbol.st_name as usize, |name| visit(slot, name.to_bytes()));
            }
        }
    }

    /// Calls `visit` with the name of each library that this object depends on.
    fn for_each_dependency(&self, reading: &Reading, mut visit: impl FnMut(&[u8])) {
        const DT_NEEDED: i64 = 1;
        let Some(tables) = Tables::of(reading, self) else { return };
        self.for_each_dynamic(reading, |tag, value, _| {
            if tag == DT_NEEDED && value < tables.strings_size {
                reading.with_c_string(tables.strings + value, |name| visit(name.to_bytes()));
            }
        });
    }
}

impl Reading {
    /// Entry `index` of a table of relocations (`DT_RELA`, `DT_JMPREL`). `None` if it is not readable.
    pub fn relocation(&self, table: usize, index: usize) -> Option<libc::Elf64_Rela> {
        self.read(table.wrapping_add(index * size_of::<libc::Elf64_Rela>()))
    }

    /// The loaded object that a program gets for the library `name`: the one with this file name, otherwise the one
    /// with this `DT_SONAME`.
    pub fn library(&self, name: &[u8]) -> Option<LoadedObject> {
        self.object_of_file(name)
            .or_else(|| self.objects().find(|o| Tables::of(self, o).is_some_and(|t| t.has_soname(self, name))))
    }
}

/// The C library's own files: glibc's, including those of before 2.34, and musl's.
const C_LIBRARY: &[&[u8]] = &[b"libc.so.", b"ld-linux", b"libdl.so.", b"libpthread.so.", b"ld-musl-", b"libc.musl-"];

/// The address of a symbol of the C library itself, whatever function of this name the program or a preloaded library
/// has. 0 if there is none.
///
/// The C library is never unloaded. So this function takes no [`Reading`] and makes no system call, and any other code
/// of this library may need it.
pub fn c_library_symbol(name: &CStr) -> usize {
    let (reading, name) = (Reading::of_startup_objects(), SymbolName::new(name.to_bytes()));
    let is_c_library = |file: &[u8]| C_LIBRARY.iter().any(|prefix| file.starts_with(prefix));
    let symbol = |object: LoadedObject| {
        object.with_file_name(&reading, is_c_library).then(|| object.symbol(&reading, &name)).flatten()
    };
    reading.objects().find_map(symbol).unwrap_or(0)
}

/// The address of a symbol that any loaded object exports: the first one in the loader's order. 0 if there is none.
///
/// Unlike `dlsym(RTLD_DEFAULT, ...)` this also finds symbols of objects that were loaded with `RTLD_LOCAL`. The loader
/// shows to nobody which those are.
pub fn first_symbol(name: &CStr) -> usize {
    let (reading, name) = (Reading::begin(), SymbolName::new(name.to_bytes()));
    reading.objects().find_map(|object| object.symbol(&reading, &name)).unwrap_or(0)
}

/// The result of [`next_symbol`].
#[derive(Clone, Copy)]
pub struct NextSymbol {
    /// The symbol's address.
    pub address: usize,
    /// The object that exports it.
    pub object: LoadedObject,
}

/// The symbol that `dlsym(RTLD_NEXT, ...)` finds when this library calls it: that of the first object after this
/// library. `None` if there is none.
///
/// Objects that the program loads with `dlopen` follow those that were loaded before it started. `limit` is the number
/// of objects from the beginning of the list that are searched. Without it the objects of `dlopen` count too, whether
/// they were loaded with `RTLD_GLOBAL` or not.
pub fn next_symbol(name: &CStr, limit: Option<usize>) -> Option<NextSymbol> {
    let (reading, name) = (Reading::begin(), SymbolName::new(name.to_bytes()));
    let ours = our_dynamic_section();
    let listed = reading.objects().take(limit.unwrap_or(usize::MAX));
    let is_late = IS_LOADED_LATE.load(Ordering::Relaxed);
    let mut after =
        listed.skip_while(|object| !is_late && object.dynamic != ours).filter(|object| object.dynamic != ours);
    after.find_map(|object| object.symbol(&reading, &name).map(|address| NextSymbol { address, object }))
}

/// Whether this object was loaded into a process that was running already. It is then the last of the list, and all
/// others are those that a program without it would search.
static IS_LOADED_LATE: AtomicBool = AtomicBool::new(false);

/// Reports that this object was loaded into a process that was running already.
pub fn set_loaded_late() {
    IS_LOADED_LATE.store(true, Ordering::Relaxed);
}

/// The address of the dynamic section of the object that contains this code. It identifies the object.
pub fn our_dynamic_section() -> usize {
    arch::dynamic_section()
}

/// The symbol that `dlsym` finds in a library: that of the library itself, otherwise of its dependencies, breadth
/// first. 0 if there is none.
pub fn symbol_of_object_and_dependencies(reading: &Reading, object: &LoadedObject, name: &CStr) -> usize {
    let name = SymbolName::new(name.to_bytes());
    if let Some(found) = object.symbol(reading, &name) {
        return found;
    }
    // Every object by its names. Two names with the same hash are as unlikely as a wrong result is harmless: the
    // library would not be searched in its turn.
    let mut by_name: Vec<(u64, LoadedObject)> = Vec::new();
    for object in reading.objects() {
        object.with_file_name(reading, |file| by_name.push((name_hash(file), object)));
        if let Some((tables, offset)) = Tables::of(reading, &object).and_then(|t| t.soname.map(|offset| (t, offset))) {
            reading.with_c_string(tables.strings + offset, |name| by_name.push((name_hash(name.to_bytes()), object)));
        }
    }
    let mut queue = vec![*object];
    let mut next = 0;
    while let Some(object) = queue.get(next).copied() {
        next += 1;
        if next > 1
            && let Some(found) = object.symbol(reading, &name)
        {
            return found;
        }
        object.for_each_dependency(reading, |needed| {
            let file = needed.rsplit(|byte| *byte == b'/').next().unwrap_or(needed);
            let hash = name_hash(file);
            let known = by_name.iter().find(|(known, _)| *known == hash).map(|(_, object)| *object);
            queue.extend(known.filter(|known| !queue.contains(known)));
        });
    }
    0
}

/// FNV-1a.
fn name_hash(name: &[u8]) -> u64 {
    name.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
