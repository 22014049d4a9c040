//! Lookups of driver functions by name, for programs that do not link the driver.

use crate::driver::{driver, version};
use simcuda::out::Out;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Looks a driver function up. An unknown name is reported in the status and is not an error.
///
/// # Safety
/// `name` is a NUL-terminated string, as CUDA's contract says.
unsafe fn ask(name: *const c_char, out: Out<*mut c_void>, version: c_int, flags: u64, status: Out<c_int>) -> c_int {
    let mut found = 0;
    // SAFETY: the caller guarantees that `name` is a NUL-terminated string. The status refers to a local variable.
    unsafe {
        (driver().get_proc_address)(name, out, version, flags, Out::from(&mut found));
        status.put(found);
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDriverEntryPointByVersion(
    name: *const c_char,
    out: Out<*mut c_void>,
    version: c_uint,
    flags: u64,
    status: Out<c_int>,
) -> c_int {
    // SAFETY: by CUDA's contract `name` is a NUL-terminated string.
    unsafe { ask(name, out, version as c_int, flags, status) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDriverEntryPoint(
    name: *const c_char,
    out: Out<*mut c_void>,
    flags: u64,
    status: Out<c_int>,
) -> c_int {
    // SAFETY: by CUDA's contract `name` is a NUL-terminated string.
    unsafe { ask(name, out, version(), flags, status) }
}

/// The flags of a `_ptsz` function: the per-thread default stream (2) unless the caller chose a stream kind itself.
fn per_thread(flags: u64) -> u64 {
    if flags == 0 { 2 } else { flags }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDriverEntryPointByVersion_ptsz(
    name: *const c_char,
    out: Out<*mut c_void>,
    version: c_uint,
    flags: u64,
    status: Out<c_int>,
) -> c_int {
    // SAFETY: by CUDA's contract `name` is a NUL-terminated string.
    unsafe { ask(name, out, version as c_int, per_thread(flags), status) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDriverEntryPoint_ptsz(
    name: *const c_char,
    out: Out<*mut c_void>,
    flags: u64,
    status: Out<c_int>,
) -> c_int {
    // SAFETY: by CUDA's contract `name` is a NUL-terminated string.
    unsafe { ask(name, out, version(), per_thread(flags), status) }
}
