//! The object of an address, by glibc's lock-free `_dl_find_object` (2.35 and later, dlfcn.h).

use std::ffi::{c_int, c_void};
use std::ptr::without_provenance_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::symbols::c_library_symbol;

/// A loaded object, as `_dl_find_object` returns it.
#[derive(Clone, Copy)]
pub struct FoundObject {
    /// Where it starts in memory, or one of its segments if there are gaps between them.
    pub start: usize,
    /// The address of the loader's record.
    pub(super) link_map: usize,
    /// The address of the path, a C string.
    pub path: usize,
}

/// `struct dl_find_object` of dlfcn.h.
#[repr(C)]
pub(super) struct DlFindObject {
    flags: u64,
    map_start: *mut c_void,
    map_end: *mut c_void,
    link_map: *mut c_void,
    eh_frame: *mut c_void,
    reserved: [u64; 7],
}

pub(super) type FindObject = unsafe extern "C" fn(*mut c_void, *mut DlFindObject) -> c_int;

/// In [`FIND_OBJECT`]: the C library does not have the function.
const MISSING: usize = 1;
/// The function's address. 0 before the first search.
static FIND_OBJECT: AtomicUsize = AtomicUsize::new(0);

#[cold]
fn search() -> usize {
    let found = c_library_symbol(c"_dl_find_object").max(MISSING);
    FIND_OBJECT.store(found, Ordering::Relaxed);
    found
}

/// Whether the C library has the function.
#[inline]
pub(super) fn is_available() -> bool {
    function().is_some()
}

/// The function. `None` if the C library does not have it.
#[inline]
pub(super) fn function() -> Option<FindObject> {
    let known = FIND_OBJECT.load(Ordering::Relaxed);
    let known = if known == 0 { search() } else { known };
    // SAFETY: any other value is the address of the C library's function, which has this type.
    (known != MISSING).then(|| unsafe { std::mem::transmute::<*mut c_void, FindObject>(without_provenance_mut(known)) })
}

/// The object that contains `address`. `None` if there is none, and if the C library lacks the function.
#[inline]
pub(super) fn containing(address: usize) -> Option<FoundObject> {
    call(function()?, address)
}

/// The object that contains `address`. `None` if there is none. `find` is the result of [`function`].
#[inline]
pub(super) fn call(find: FindObject, address: usize) -> Option<FoundObject> {
    // SAFETY: `DlFindObject` is plain data, for which zeros are valid.
    let mut found: DlFindObject = unsafe { std::mem::zeroed() };
    // SAFETY: `_dl_find_object` accepts any address and writes to `found`.
    let result = unsafe { find(without_provenance_mut(address), &mut found) };
    if result != 0 || found.link_map.is_null() {
        return None;
    }
    // SAFETY: `link_map` is not null, and it is the loader's record of a loaded object. Its second word is the path
    // (`l_name` of link.h).
    let path = unsafe { found.link_map.cast::<usize>().add(1).read() };
    Some(FoundObject { start: found.map_start.addr(), link_map: found.link_map.expose_provenance(), path })
}
