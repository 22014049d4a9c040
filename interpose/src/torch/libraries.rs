//! PyTorch's libraries in this process.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::linker::original::OriginalFunction;
use crate::linker::shared_objects::exported_by;

/// Set once PyTorch has called one of our hooks, so its libraries are loaded.
static IS_LOADED: AtomicBool = AtomicBool::new(false);

/// Reports that PyTorch has called a hook.
pub(super) fn set_loaded() {
    IS_LOADED.store(true, Ordering::Relaxed);
}

/// Whether PyTorch has called a hook.
#[inline]
pub(super) fn is_loaded() -> bool {
    IS_LOADED.load(Ordering::Relaxed)
}

/// How many more calls of other objects are examined for whether PyTorch's allocator caused them. Each takes a native
/// stack.
///
/// It is 0 before the allocator is loaded and after its first own call. Belongs to the loaded library, not to a
/// recording.
pub(super) static STACK_CHECKS_LEFT: AtomicU32 = AtomicU32::new(0);
const MAX_STACK_CHECKS: u32 = 100;

/// Reports that an object has been loaded. This is noticed at the program's next `dlsym`; the CUDA runtime calls it to
/// find the driver.
pub(crate) fn object_loaded(file_name: &[u8]) {
    if is_allocator(file_name) {
        STACK_CHECKS_LEFT.store(MAX_STACK_CHECKS, Ordering::Relaxed);
    }
}

/// Whether this file is PyTorch's CUDA caching allocator.
pub(crate) fn is_allocator(file_name: &[u8]) -> bool {
    file_name.starts_with(b"libc10_cuda")
}

/// A function that libc10 exports. Null if there is none.
pub(super) fn libc10(cache: &'static OriginalFunction, name: &CStr) -> *mut c_void {
    cache.get_or_find(|| exported_by(b"libc10.so", name))
}

/// A function that libtorch_cpu exports. Null if there is none.
pub(super) fn libtorch_cpu(cache: &'static OriginalFunction, name: &CStr) -> *mut c_void {
    cache.get_or_find(|| exported_by(b"libtorch_cpu.so", name))
}
