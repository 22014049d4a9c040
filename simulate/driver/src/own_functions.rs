//! The functions that this library exports, read from its own dynamic section. Stubs are left out: a lookup of a
//! function that nobody wrote fails as with a driver that lacks it.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// The addresses of this library's `cu*` functions, by name.
pub(crate) fn own_functions() -> &'static HashMap<&'static str, usize> {
    static FUNCTIONS: OnceLock<HashMap<&'static str, usize>> = OnceLock::new();
    FUNCTIONS.get_or_init(|| {
        let mut search = Search { inside: own_functions as fn() -> _ as usize, found: HashMap::new() };
        // SAFETY: `visit` gets the pointer to `search`, which outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
        search.found
    })
}

struct Search {
    /// An address in this library.
    inside: usize,
    found: HashMap<&'static str, usize>,
}

/// Reads the functions of the object that contains the address, and ends the iteration there.
///
/// # Safety
/// `info` is valid, and `data` points to a [`Search`].
unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> c_int {
    // SAFETY: the caller guarantees both, and the program headers are those of a loaded object.
    let (info, search) = unsafe { (&*info, &mut *data.cast::<Search>()) };
    // SAFETY: `dl_iterate_phdr` gives the number of the program headers with their address.
    let segments = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let base = info.dlpi_addr as usize;
    let contains = |s: &libc::Elf64_Phdr| {
        let start = base.wrapping_add(s.p_vaddr as usize);
        s.p_type == libc::PT_LOAD && (start..start + s.p_memsz as usize).contains(&search.inside)
    };
    if !segments.iter().any(contains) {
        return 0;
    }
    if let Some(dynamic) = segments.iter().find(|s| s.p_type == libc::PT_DYNAMIC) {
        // SAFETY: this is the dynamic section of a loaded library, this one, which `simcuda-build` made.
        search.found = unsafe { functions(base, base.wrapping_add(dynamic.p_vaddr as usize) as *const [usize; 2]) };
    }
    1
}

/// Reads the functions of a loaded library with a `DT_HASH` table.
///
/// # Safety
/// `dynamic` is the dynamic section of a library that is loaded at `base` and is never unloaded.
unsafe fn functions(base: usize, dynamic: *const [usize; 2]) -> HashMap<&'static str, usize> {
    const DT_HASH: usize = 4;
    const DT_STRTAB: usize = 5;
    const DT_SYMTAB: usize = 6;
    let (mut hash, mut strings, mut symbols) = (0, 0, 0);
    // SAFETY: a dynamic section ends with a zero.
    for [tag, value] in (0..).map(|i| unsafe { *dynamic.add(i) }).take_while(|[tag, _]| *tag != 0) {
        match tag {
            DT_HASH => hash = value,
            DT_STRTAB => strings = value,
            DT_SYMTAB => symbols = value,
            _ => {}
        }
    }
    if hash == 0 {
        return HashMap::new();
    }
    // SAFETY: the dynamic linker has made addresses of these entries. The second word of the hash table is the number
    // of symbols, and the name of each is a NUL-terminated string in the string table.
    unsafe {
        let count = *(hash as *const u32).add(1) as usize;
        let symbols = std::slice::from_raw_parts(symbols as *const libc::Elf64_Sym, count);
        let defined = symbols.iter().filter(|symbol| symbol.st_shndx != 0);
        let named = defined.map(|symbol| {
            let name = CStr::from_ptr((strings + symbol.st_name as usize) as *const c_char);
            (name.to_str().unwrap_or_default(), symbol)
        });
        let functions: Vec<_> = named.filter(|(name, _)| name.starts_with("cu")).collect();
        // `simcuda-build` puts stubs into a section of their own.
        let section = functions.iter().find(|(name, _)| *name == "cuInit").map(|(_, symbol)| symbol.st_shndx);
        let written = functions.into_iter().filter(|(_, symbol)| Some(symbol.st_shndx) == section);
        written.map(|(name, symbol)| (name, base.wrapping_add(symbol.st_value as usize))).collect()
    }
}
