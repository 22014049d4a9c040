//! CUPTI: present, but it never reports any activity.

use simcuda::out::Out;
use std::ffi::{c_char, c_int, c_void};

const MAX_LIMIT_REACHED: c_int = 12;

#[unsafe(no_mangle)]
extern "C" fn cuptiGetVersion(version: Out<u32>) -> c_int {
    version.put(130_000);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuptiActivityGetNextRecord(_buffer: *const c_void, _size: usize, record: Out<*mut c_void>) -> c_int {
    record.put(std::ptr::null_mut());
    MAX_LIMIT_REACHED
}

#[unsafe(no_mangle)]
extern "C" fn cuptiGetResultString(_status: c_int, text: Out<*const c_char>) -> c_int {
    text.put(c"simulated CUPTI status".as_ptr());
    0
}
