//! The slots through which a loaded object calls functions of others, and symbols of one library.
//!
//! Constraints: reads only the loader's own structures and the mapped, read-only parts of objects
//! ([`memtrace_stackwalk::loader`]). It loads no object, looks up no symbol through the loader and takes none of its
//! locks.

use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::ptr::with_exposed_provenance_mut;

use memtrace_stackwalk::arch;
use memtrace_stackwalk::loader::{LoadedObject, Reading, SymbolName, symbol_of_object_and_dependencies};

/// The slots through which this object calls functions of others. `replacement_of` selects functions by name and gives
/// the replacement. Returns pairs of the slot's address and the replacement.
///
/// It reads the undefined symbols first, so an object that imports no such function costs little.
pub(crate) fn import_slots(
    reading: &Reading,
    object: &LoadedObject,
    mut replacement_of: impl FnMut(&[u8]) -> Option<usize>,
) -> Vec<(usize, usize)> {
    const DT_RELA: i64 = 7;
    const DT_RELASZ: i64 = 8;
    const DT_JMPREL: i64 = 23;
    const DT_PLTRELSZ: i64 = 2;
    /// A larger table belongs to a very large library. Reading all its data relocations would take too long.
    const MAX_RELOCATIONS: usize = 200_000;
    let mut targets: Vec<(u32, usize)> = Vec::new();
    object.for_each_import(reading, |index, name| {
        targets.extend(replacement_of(name).map(|replacement| (index as u32, replacement)));
    });
    if targets.is_empty() {
        return Vec::new();
    }
    let (mut rela, mut rela_size, mut jmprel, mut jmprel_size) = (0, 0, 0, 0);
    object.for_each_dynamic(reading, |tag, value, address| match tag {
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
            let Some(entry) = reading.relocation(table, index) else { break };
            let (kind, symbol) = (entry.r_info as u32, (entry.r_info >> 32) as u32);
            if matches!(kind, arch::R_GLOB_DAT | arch::R_JUMP_SLOT)
                && let Some((_, replacement)) = targets.iter().find(|(index, _)| *index == symbol)
            {
                slots.push((object.bias.wrapping_add(entry.r_offset as usize), *replacement));
            }
        }
    }
    slots
}

/// A symbol that the loaded object of this file name or one of its dependencies exports. Null if there is none.
pub(crate) fn exported_by(file_name: &[u8], name: &CStr) -> *mut c_void {
    let reading = Reading::begin();
    let found = reading.object_of_file(file_name).map(|o| symbol_of_object_and_dependencies(&reading, &o, name));
    with_exposed_provenance_mut(found.unwrap_or(0))
}

/// A symbol that the loaded library with this file name or `DT_SONAME` exports. Null if there is none.
pub(crate) fn exported_by_library(library: &CStr, name: &CStr) -> *mut c_void {
    let reading = Reading::begin();
    let found = reading.library(library.to_bytes()).map(|o| symbol_of_object_and_dependencies(&reading, &o, name));
    with_exposed_provenance_mut(found.unwrap_or(0))
}

/// The addresses of a function that the object of this file name exports. `None` if there is none.
pub(crate) fn exported_function(file_name: &[u8], name: &CStr) -> Option<Range<usize>> {
    let reading = Reading::begin();
    reading.object_of_file(file_name)?.function(&reading, &SymbolName::new(name.to_bytes()))
}

/// The address of the first symbol that begins with `prefix`, of those that the object of this file name exports.
pub(crate) fn exported_with_prefix(file_name: &[u8], prefix: &[u8]) -> Option<usize> {
    let reading = Reading::begin();
    reading.object_of_file(file_name)?.symbol_with_prefix(&reading, prefix)
}
