//! Functions of other libraries that are looked up when they are first called, so that the loader does not have to.
//!
//! The loader would otherwise require two libraries for every traced process. One is libgcc_s, which exceptions need
//! when they pass through our frames. A program that throws has it, and a container without C++ may not. The other is
//! glibc's own loader under its own name. The loader of another C library (musl) cannot find that and ends the process.
//! With these stubs only the C library is required.
//!
//! A stub leaves no frame. It jumps to the function with registers and stack unchanged.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use super::original;
use crate::arch::resolving_stubs;

resolving_stubs! { "memtrace_lazy", resolve,
    "__tls_get_addr"
    "_Unwind_Backtrace" "_Unwind_GetDataRelBase" "_Unwind_GetIP" "_Unwind_GetIPInfo" "_Unwind_GetLanguageSpecificData"
    "_Unwind_GetRegionStart" "_Unwind_GetTextRelBase" "_Unwind_RaiseException" "_Unwind_Resume" "_Unwind_SetGR"
    "_Unwind_SetIP"
}

/// Finds the function of a stub and stores it in `slot`. It must not use Rust's thread-local storage, because
/// `__tls_get_addr` is one of these stubs.
unsafe extern "C" fn resolve(name: *const c_char, slot: *const AtomicPtr<c_void>) -> *mut c_void {
    // SAFETY: the stub passes its own C string and its own word.
    let (name, slot) = unsafe { (CStr::from_ptr(name), &*slot) };
    // Sanitizers export a `__tls_get_addr` of their own, which may not be ready yet.
    let mut found = original::c_library_function(name);
    if found.is_null() {
        // The program's unwinder: an exception must be resumed by the one that raised it.
        found = original::global_address(name);
    }
    if found.is_null() && !original::load(c"libgcc_s.so.1").is_null() {
        // The program has no unwinder that others can use. So an exception passes through our frames only if an
        // object with an unwinder of its own throws it, and libgcc's continues it.
        found = original::global_address(name);
    }
    if found.is_null() {
        return end_of_stack as *mut c_void;
    }
    slot.store(found, Ordering::Relaxed);
    found
}

/// The result if there is no unwinder: `_URC_END_OF_STACK`. Without an unwinder, no code throws.
extern "C" fn end_of_stack() -> c_int {
    5
}
