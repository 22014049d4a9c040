//! `cuGetProcAddress`: functions by their base name.
//!
//! The search is in this library's own table, never through the dynamic linker, as in the real driver: what an
//! LD_PRELOADed library defines under the same name is not seen this way. `simcuda-build` makes the table out of the
//! symbols it finds in the archive and links it in.

use crate::state::machine;
use simcuda::error::Error;
use simcuda::out::Out;
use std::ffi::{CStr, c_char, c_int, c_void};

/// One line of the table.
#[repr(C)]
struct Entry {
    name: *const c_char,
    address: *mut c_void,
}

unsafe extern "C" {
    /// Sorted by nothing in particular; `simcuda_entry_count` lines.
    static simcuda_entries: [Entry; 0];
    static simcuda_entry_count: usize;
}

const PER_THREAD_DEFAULT_STREAM: u64 = 2;
const FOUND: c_int = 0;
const NOT_FOUND: c_int = 1;
const VERSION_NOT_SUFFICIENT: c_int = 2;

/// The CUDA version (1000 * major + 10 * minor) from which on a later version of a function is given out; those not
/// listed are older than anything that asks.
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
    // SAFETY: the table is a constant of this library with that many lines.
    let table = unsafe { std::slice::from_raw_parts(simcuda_entries.as_ptr(), simcuda_entry_count) };
    // SAFETY: the names are string literals.
    let line = table.iter().find(|e| unsafe { CStr::from_ptr(e.name) }.to_bytes() == symbol.as_bytes())?;
    Some(line.address)
}

/// The newest version of `name` up to a CUDA version, per-thread-default-stream variant first where that is asked for.
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

unsafe fn answer(name: *const c_char, out: Out<*mut c_void>, version: c_int, flags: u64, status: Out<c_int>) -> c_int {
    if name.is_null() || out.is_null() {
        return Error::InvalidValue.code();
    }
    // SAFETY: a C string, by the interface's contract.
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
    // SAFETY: a C string, by the interface's contract.
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
    // SAFETY: a C string, by the interface's contract.
    unsafe { answer(name, out, version, flags, status) }
}
