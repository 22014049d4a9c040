//! Finds `struct r_debug` (link.h), through which the loader shows its list of objects to debuggers.
//!
//! Its address is in the executable's dynamic section (`DT_DEBUG`). glibc and musl both fill in that entry before any
//! code of an object runs. An executable may lack the entry; then the loader's symbol `_r_debug` is used.

use std::ffi::c_int;
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use super::super::arch;

/// `struct r_debug`. Newer versions have more fields at the end.
#[repr(C)]
pub(super) struct RDebug {
    version: c_int,
    /// The first `struct link_map` of the main namespace.
    map: AtomicUsize,
    brk: usize,
    /// `RT_CONSISTENT`, `RT_ADD` or `RT_DELETE`.
    state: AtomicI32,
}

/// `RT_DELETE` of link.h: objects are being unmapped and removed from the list.
const RT_DELETE: i32 = 2;

/// A `DT_*` or `AT_*` entry.
pub(super) type DynamicEntry = [usize; 2];

impl RDebug {
    /// The address of the first object's `struct link_map`.
    pub(super) fn first(&self) -> usize {
        self.map.load(Ordering::Acquire)
    }

    /// Whether the loader is unmapping objects. It has run their destructors already, so no code of the program runs in
    /// this phase.
    pub(super) fn is_unmapping(&self) -> bool {
        self.state.load(Ordering::Acquire) == RT_DELETE
    }
}

/// The loader's record. `None` in a statically linked program.
pub(super) fn r_debug() -> Option<&'static RDebug> {
    static R_DEBUG: AtomicUsize = AtomicUsize::new(0);
    let mut address = R_DEBUG.load(Ordering::Relaxed);
    if address == 0 {
        address = debug_entry().filter(|address| *address != 0).unwrap_or_else(arch::r_debug_symbol);
        R_DEBUG.store(address, Ordering::Relaxed);
    }
    // SAFETY: the address is 0 or that of the loader's `_r_debug`, which lives as long as the process. The fields that
    // change are atomic here.
    unsafe { with_exposed_provenance::<RDebug>(address).as_ref() }
}

/// The program headers of the executable: the address of the first one, and their number.
pub(super) fn executable_headers() -> (usize, usize) {
    // SAFETY: `getauxval` takes any number.
    unsafe { (libc::getauxval(libc::AT_PHDR) as usize, libc::getauxval(libc::AT_PHNUM) as usize) }
}

/// The value of `DT_DEBUG` in the executable's dynamic section.
fn debug_entry() -> Option<usize> {
    const DT_NULL: usize = 0;
    const DT_DEBUG: usize = 21;
    /// The offset of the program headers in a file: that of the file header's end, in every linker's output.
    const HEADERS_OFFSET: usize = size_of::<libc::Elf64_Ehdr>();
    let (headers_at, count) = executable_headers();
    if headers_at == 0 || !headers_at.is_multiple_of(align_of::<libc::Elf64_Phdr>()) {
        return None;
    }
    // SAFETY: the kernel gives the address and the number of the executable's program headers, which stay mapped.
    let headers = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<libc::Elf64_Phdr>(headers_at), count) };
    let address_of = |kind: u32| headers.iter().find(|header| header.p_type == kind).map(|h| h.p_vaddr as usize);
    let first = headers.iter().find(|header| header.p_type == libc::PT_LOAD)?;
    let headers_address = address_of(libc::PT_PHDR)
        .unwrap_or((first.p_vaddr as usize).wrapping_add(HEADERS_OFFSET).wrapping_sub(first.p_offset as usize));
    let bias = headers_at.wrapping_sub(headers_address);
    let mut entry = with_exposed_provenance::<DynamicEntry>(bias.wrapping_add(address_of(libc::PT_DYNAMIC)?));
    loop {
        // SAFETY: the dynamic section is an array that ends with `DT_NULL`, and the loop has not passed that entry.
        let [tag, value] = unsafe { entry.read() };
        match tag {
            DT_NULL => return None,
            DT_DEBUG => return Some(value),
            // SAFETY: the entry just read is not `DT_NULL`, so another one follows.
            _ => entry = unsafe { entry.add(1) },
        }
    }
}
