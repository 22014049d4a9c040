//! Functions of the CUDA driver that memtrace calls itself.

use std::ffi::{CStr, c_int, c_void};

use crate::linker::original::OriginalFunction;
use crate::linker::shared_objects::exported_by_library;

/// The address of a symbol that the loaded driver library exports. Null if there is none.
pub(super) fn driver_symbol(name: &CStr) -> *mut c_void {
    exported_by_library(c"libcuda.so.1", name)
}

/// The driver's own function of this name, not our export. Null if there is none.
pub(super) fn driver_function(cache: &'static OriginalFunction, name: &CStr) -> *mut c_void {
    cache.get_or_find(|| driver_symbol(name))
}

/// Calls a function of the driver. `None` if the driver has no such function.
///
/// # Safety
///
/// `F` is the type of the driver function `name`.
pub(super) unsafe fn call_driver<F: Copy>(
    cache: &'static OriginalFunction,
    name: &CStr,
    call: impl FnOnce(F) -> c_int,
) -> Option<c_int> {
    let function: *mut c_void = driver_function(cache, name);
    if function.is_null() || size_of::<F>() != size_of::<*mut c_void>() {
        return None;
    }
    // SAFETY: the caller guarantees the type `F`, and it has the size of a pointer.
    Some(call(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&function) }))
}
