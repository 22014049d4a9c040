//! `cuGetProcAddress`: finds functions by their base name.
//!
//! Like the real driver, it searches this library's own functions and never uses the dynamic linker. It therefore does
//! not find the definitions of a preloaded library under the same name.

use crate::own_functions::own_functions;
use crate::state::machine;
use simcuda::error::Error;
use simcuda::out::Out;
use std::ffi::{CStr, c_char, c_int, c_void};

const PER_THREAD_DEFAULT_STREAM: u64 = 2;
const FOUND: c_int = 0;
const NOT_FOUND: c_int = 1;
const VERSION_NOT_SUFFICIENT: c_int = 2;

/// The CUDA version (1000 * major + 10 * minor) from which on a newer variant of a function is returned.
///
/// 0 for functions that are older than any version that a program asks for.
fn since(symbol: &str) -> c_int {
    match symbol {
        "cuCtxCreate_v3" | "cuDeviceGetUuid_v2" => 11040,
        "cuCtxCreate_v4" => 12050,
        "cuEventElapsedTime_v2" => 12080,
        "cuGetProcAddress_v2" => 12000,
        "cuStreamGetCaptureInfo_v2" => 11030,
        "cuStreamGetCaptureInfo_v3" => 12030,
        "cuStreamWriteValue32_v2" | "cuStreamWriteValue64_v2" | "cuStreamWaitValue32_v2" => 11070,
        _ => 0,
    }
}

fn own(symbol: &str) -> Option<*mut c_void> {
    own_functions().get(symbol).map(|address| *address as *mut c_void)
}

/// The newest variant of `name` up to a CUDA version. With the flag, the variant with a per-thread default stream comes
/// first.
fn look_up(name: &str, version: c_int, flags: u64) -> Result<*mut c_void, c_int> {
    let mut result = Err(NOT_FOUND);
    for suffix in ["_v4", "_v3", "_v2", ""] {
        let symbol = format!("{name}{suffix}");
        let variant = [format!("{symbol}_ptsz"), format!("{symbol}_ptds")];
        let variant = variant.iter().filter(|_| flags & PER_THREAD_DEFAULT_STREAM != 0);
        let Some(address) = variant.filter_map(|v| own(v)).next().or_else(|| own(&symbol)) else { continue };
        if since(&symbol) <= version {
            return Ok(address);
        }
        result = Err(VERSION_NOT_SUFFICIENT);
    }
    result
}

/// Serves a lookup of a function by name.
///
/// # Safety
/// `name` is null or a NUL-terminated string.
unsafe fn answer(name: *const c_char, out: Out<*mut c_void>, version: c_int, flags: u64, status: Out<c_int>) -> c_int {
    if name.is_null() || out.is_null() {
        return Error::InvalidValue.code();
    }
    // SAFETY: `name` is not null, and the caller guarantees that it is a NUL-terminated string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let found = look_up(&name, version, flags);
    out.put(found.unwrap_or(std::ptr::null_mut()));
    status.put(found.err().unwrap_or(FOUND));
    match found {
        Ok(_) => 0,
        Err(_) => {
            machine().stub(&format!("cuGetProcAddress({name})"));
            Error::NotFound.code()
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress(name: *const c_char, out: Out<*mut c_void>, version: c_int, flags: u64) -> c_int {
    // SAFETY: by CUDA's contract `name` is a NUL-terminated string.
    unsafe { answer(name, out, version, flags, Out::NONE) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    out: Out<*mut c_void>,
    version: c_int,
    flags: u64,
    status: Out<c_int>,
) -> c_int {
    // SAFETY: by CUDA's contract `name` is a NUL-terminated string.
    unsafe { answer(name, out, version, flags, status) }
}
