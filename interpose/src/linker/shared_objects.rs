//! The shared objects that the loader has loaded into this process: their symbols and the slots through which they call
//! others.
//!
//! Constraints: reads only the loader's own structures and the mapped, read-only parts of objects. It loads no object
//! and looks up no symbol through the loader.

use std::ffi::{CStr, CString, c_int, c_void};

/// A loaded object.
#[derive(Clone, Debug)]
pub(crate) struct SharedObject {
    /// The load address, to which the addresses in the object's file are relative.
    pub(crate) base: usize,
    /// The path as the loader has it. Empty for the executable.
    pub(crate) path: CString,
    /// The address of the dynamic section, 0 if there is none.
    dynamic: usize,
}

impl SharedObject {
    /// The file name, without the folders.
    pub(crate) fn file_name(&self) -> &[u8] {
        let path = self.path.to_bytes();
        path.rsplit(|b| *b == b'/').next().unwrap_or(path)
    }

    /// The slots through which this object calls functions of others. `replacement_of` selects functions by name and
    /// gives the replacement. Returns pairs of the slot's address and the replacement.
    ///
    /// It reads the undefined symbols first, so an object that imports no such function costs little.
    pub(crate) fn import_slots(&self, mut replacement_of: impl FnMut(&[u8]) -> Option<usize>) -> Vec<(usize, usize)> {
        const DT_RELA: i64 = 7;
        const DT_RELASZ: i64 = 8;
        const DT_JMPREL: i64 = 23;
        const DT_PLTRELSZ: i64 = 2;
        const R_X86_64_GLOB_DAT: u32 = 6;
        const R_X86_64_JUMP_SLOT: u32 = 7;
        /// A larger table belongs to a very large library. Reading all its data relocations would take too long.
        const MAX_RELOCATIONS: usize = 200_000;
        let Some(tables) = self.symbol_tables() else { return Vec::new() };
        let (first_defined, _) = gnu_hash_range(tables.hash);
        let targets: Vec<(u32, usize)> = (1..first_defined)
            .filter_map(|index| Some((index as u32, replacement_of(self.symbol_name(&tables, index)?)?)))
            .collect();
        if targets.is_empty() {
            return Vec::new();
        }
        let (mut rela, mut rela_size, mut jmprel, mut jmprel_size) = (0, 0, 0, 0);
        self.for_each_dynamic(|tag, value, address| match tag {
            DT_RELA => rela = address,
            DT_RELASZ => rela_size = value,
            DT_JMPREL => jmprel = address,
            DT_PLTRELSZ => jmprel_size = value,
            _ => {}
        });
        let mut slots = Vec::new();
        for (table, size) in [(jmprel, jmprel_size), (rela, rela_size)] {
            let count = size / size_of::<libc::Elf64_Rela>();
            if table == 0 || count > MAX_RELOCATIONS {
                continue;
            }
            for index in 0..count {
                // SAFETY: `index` is inside the table, whose size the object's dynamic section states.
                let entry = unsafe { &*(table as *const libc::Elf64_Rela).add(index) };
                let (kind, symbol) = (entry.r_info as u32, (entry.r_info >> 32) as u32);
                if matches!(kind, R_X86_64_GLOB_DAT | R_X86_64_JUMP_SLOT)
                    && let Some((_, replacement)) = targets.iter().find(|(index, _)| *index == symbol)
                {
                    slots.push((self.base + entry.r_offset as usize, *replacement));
                }
            }
        }
        slots
    }

    /// The address of the first exported symbol that begins with `prefix`. For C++ functions whose parameters differ
    /// between versions. Searches the symbol table linearly.
    pub(crate) fn symbol_with_prefix(&self, prefix: &[u8]) -> Option<usize> {
        let tables = self.symbol_tables()?;
        let (_, count) = gnu_hash_range(tables.hash);
        (0..count).find_map(|index| {
            let name = self.symbol_name(&tables, index)?;
            let symbol = tables.symbol(index);
            (symbol.st_shndx != 0 && name.starts_with(prefix)).then(|| self.base + symbol.st_value as usize)
        })
    }

    /// The address of the exported symbol of this name in any version, found with the object's hash table.
    fn symbol(&self, name: &[u8], hash: u32) -> Option<usize> {
        let tables = self.symbol_tables()?;
        gnu_hash_find(tables.hash, hash, |index| {
            let symbol = tables.symbol(index);
            (symbol.st_shndx != 0 && self.symbol_name(&tables, index)? == name)
                .then(|| self.base + symbol.st_value as usize)
        })
    }

    fn symbol_name(&self, tables: &SymbolTables, index: usize) -> Option<&[u8]> {
        let name = tables.symbol(index).st_name as usize;
        if name >= tables.strings_size {
            return None;
        }
        // SAFETY: `name` is inside the string table, which ends with a NUL. The table is mapped as long as the object.
        Some(unsafe { CStr::from_ptr((tables.strings + name) as *const _) }.to_bytes())
    }

    /// Calls `visit` with (tag, value, value as an address) for each entry of the dynamic section.
    fn for_each_dynamic(&self, mut visit: impl FnMut(i64, usize, usize)) {
        const DT_NULL: i64 = 0;
        let mut entry = self.dynamic as *const [i64; 2];
        while !entry.is_null() {
            // SAFETY: the dynamic section is an array that ends with `DT_NULL`, and the loop has not passed that entry.
            let [tag, value] = unsafe { entry.read() };
            if tag == DT_NULL {
                break;
            }
            let value = value as usize;
            // glibc relocates these pointers in place, except in objects whose dynamic section is read-only (the vDSO).
            visit(tag, value, if value < self.base { self.base + value } else { value });
            // SAFETY: the entry just read is not `DT_NULL`, so another one follows.
            entry = unsafe { entry.add(1) };
        }
    }

    fn symbol_tables(&self) -> Option<SymbolTables> {
        const DT_STRTAB: i64 = 5;
        const DT_SYMTAB: i64 = 6;
        const DT_STRSZ: i64 = 10;
        const DT_GNU_HASH: i64 = 0x6fff_fef5;
        let (mut strings, mut strings_size, mut symbols, mut hash) = (0, 0, 0, 0);
        self.for_each_dynamic(|tag, value, address| match tag {
            DT_STRTAB => strings = address,
            DT_SYMTAB => symbols = address,
            DT_STRSZ => strings_size = value,
            DT_GNU_HASH => hash = address,
            _ => {}
        });
        if strings == 0 || symbols == 0 || hash == 0 {
            return None;
        }
        Some(SymbolTables { strings, strings_size, symbols, hash })
    }
}

struct SymbolTables {
    strings: usize,
    strings_size: usize,
    symbols: usize,
    /// The address of the `DT_GNU_HASH` table.
    hash: usize,
}

impl SymbolTables {
    fn symbol(&self, index: usize) -> &libc::Elf64_Sym {
        // SAFETY: callers take `index` from the object's own hash table, which covers only existing symbols.
        unsafe { &*(self.symbols as *const libc::Elf64_Sym).add(index) }
    }
}

/// The indices of the symbols that a `DT_GNU_HASH` table covers: the first one, and one more than the last one.
fn gnu_hash_range(table: usize) -> (usize, usize) {
    let word = |index: usize| {
        // SAFETY: callers pass the address of a mapped hash table, and all indices follow its layout. It has four words
        // of header, the bloom filter, the buckets and the chains. Bit 0 is set in the last word of each chain.
        unsafe { (table as *const u32).add(index).read() }
    };
    let (buckets, first, bloom) = (word(0) as usize, word(1) as usize, word(2) as usize);
    let bucket_at = 4 + bloom * 2;
    let chain_at = bucket_at + buckets;
    let mut last = (0..buckets).map(|b| word(bucket_at + b) as usize).max().unwrap_or(0);
    if last < first {
        return (first, first);
    }
    while word(chain_at + last - first) & 1 == 0 {
        last += 1;
    }
    (first, last + 1)
}

/// The hash function of `DT_GNU_HASH` tables.
fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381, |hash: u32, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)))
}

/// Calls `visit` with the index of each symbol of this hash until it returns a value.
fn gnu_hash_find<T>(table: usize, hash: u32, mut visit: impl FnMut(usize) -> Option<T>) -> Option<T> {
    // SAFETY: callers pass the address of a mapped hash table, and all indices follow its layout. It has four words of
    // header, the bloom filter, the buckets and the chains. Bit 0 is set in the last word of each chain.
    let word = |index: usize| unsafe { (table as *const u32).add(index).read() };
    let (buckets, first, bloom, shift) = (word(0) as usize, word(1) as usize, word(2) as usize, word(3));
    if buckets == 0 || bloom == 0 {
        return None;
    }
    // SAFETY: the filter's 64-bit words follow the 16-byte header, and the index is below their number.
    let filter = unsafe { ((table + 16) as *const u64).add(hash as usize / 64 % bloom).read() };
    if filter >> (hash % 64) & filter >> (hash.checked_shr(shift).unwrap_or(0) % 64) & 1 == 0 {
        return None;
    }
    let bucket_at = 4 + bloom * 2;
    let chain_at = bucket_at + buckets;
    let mut index = word(bucket_at + hash as usize % buckets) as usize;
    while index >= first {
        let link = word(chain_at + index - first);
        if link | 1 == hash | 1
            && let Some(found) = visit(index)
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

/// Calls `visit` for every loaded object until it returns a value.
pub(crate) fn find_map<T>(visit: impl FnMut(&SharedObject) -> Option<T>) -> Option<T> {
    struct State<F, T> {
        visit: F,
        found: Option<T>,
    }
    unsafe extern "C" fn step<F: FnMut(&SharedObject) -> Option<T>, T>(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: `dl_iterate_phdr` passes its own info and the pointer to our `State`. Both are valid during the call.
        let (info, state) = unsafe { (&*info, &mut *data.cast::<State<F, T>>()) };
        let path = if info.dlpi_name.is_null() {
            CString::default()
        } else {
            // SAFETY: `dlpi_name` is not null, and the loader keeps a C string there.
            unsafe { CStr::from_ptr(info.dlpi_name) }.to_owned()
        };
        let mut dynamic = 0;
        for index in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: the loader provides `dlpi_phnum` program headers.
            let header = unsafe { &*info.dlpi_phdr.add(index) };
            if header.p_type == libc::PT_DYNAMIC {
                dynamic = info.dlpi_addr as usize + header.p_vaddr as usize;
            }
        }
        state.found = (state.visit)(&SharedObject { base: info.dlpi_addr as usize, path, dynamic });
        c_int::from(state.found.is_some())
    }
    let mut state = State { visit, found: None };
    // SAFETY: `step_of` chooses the callback for the type of `state`. `state` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(step_of(&state)), (&raw mut state).cast()) };
    return state.found;

    fn step_of<F: FnMut(&SharedObject) -> Option<T>, T>(
        _: &State<F, T>,
    ) -> unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int {
        step::<F, T>
    }
}

/// The loaded object with this file name, for example `libc10.so`. The first one if there are several.
pub(crate) fn find_by_name(file_name: &[u8]) -> Option<SharedObject> {
    find_map(|o| (o.file_name() == file_name).then(|| o.clone()))
}

/// The address of `symbol` in the first object that exports it and whose file name begins with one of `names`. 0 if
/// there is none.
pub(crate) fn exported_address(symbol: &[u8], names: &[&[u8]]) -> usize {
    let hash = gnu_hash(symbol);
    find_map(|o| names.iter().any(|name| o.file_name().starts_with(name)).then(|| o.symbol(symbol, hash)).flatten())
        .unwrap_or(0)
}

/// Whether any loaded object exports `symbol`, in any scope.
pub(crate) fn is_exported(symbol: &[u8]) -> bool {
    let hash = gnu_hash(symbol);
    find_map(|o| o.symbol(symbol, hash)).is_some()
}

/// How many objects the loader has ever loaded into this process.
pub(crate) fn loaded_count() -> u64 {
    load_counts().0
}

/// How many objects the loader has ever unloaded from this process.
pub(crate) fn unloaded_count() -> u64 {
    load_counts().1
}

/// How many objects were ever loaded, and how many were ever unloaded.
fn load_counts() -> (u64, u64) {
    unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, size: usize, data: *mut c_void) -> c_int {
        // SAFETY: `info` is the loader's own record and has these counters if `size` covers them. `data` points to our
        // pair.
        unsafe {
            if size >= std::mem::offset_of!(libc::dl_phdr_info, dlpi_subs) + size_of::<u64>() {
                *data.cast::<(u64, u64)>() = ((*info).dlpi_adds, (*info).dlpi_subs);
            }
        }
        1
    }
    let mut load_counts = (0u64, 0u64);
    // SAFETY: the callback writes one pair, which outlives the call, and ends the iteration.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut load_counts).cast()) };
    load_counts
}
