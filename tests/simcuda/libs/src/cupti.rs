//! CUPTI: there, and never with anything to tell.

use crate::support::put;
use std::ffi::{c_char, c_int, c_void};

const MAX_LIMIT_REACHED: c_int = 12;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuptiGetVersion(version: *mut u32) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { put(version, 130_000) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuptiActivityGetNextRecord(
    _buffer: *const c_void,
    _size: usize,
    record: *mut *mut c_void,
) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { put(record, std::ptr::null_mut()) };
    MAX_LIMIT_REACHED
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuptiGetResultString(_status: c_int, text: *mut *const c_char) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { put(text, c"simulated CUPTI status".as_ptr()) };
    0
}
