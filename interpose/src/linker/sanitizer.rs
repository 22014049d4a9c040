//! The answer to AddressSanitizer's question for default options.
//!
//! Its runtime, as a shared library, ends every program in which another library comes before it. It asks this first,
//! and it takes an answer of the program itself before this one. Other sanitizers do not check the order.

use std::ffi::{CStr, c_char};

/// Allows libraries before the runtime. This library replaces none of the functions that the runtime needs first.
const OPTIONS: &CStr = c"verify_asan_link_order=0";

/// The runtime calls this function while it starts, before any constructor of this process.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn __asan_default_options() -> *const c_char {
    OPTIONS.as_ptr()
}
