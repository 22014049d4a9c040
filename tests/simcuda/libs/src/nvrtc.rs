//! NVRTC: every program compiles, to nothing.

use crate::support::{Handle, create, destroy, put};
use std::ffi::{c_char, c_int, c_void};

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe {
        put(major, 13);
        put(minor, 0);
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(_status: c_int) -> *const c_char {
    c"simulated NVRTC status".as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCreateProgram(out: *mut *mut Handle) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { create(out) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut Handle) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe {
        destroy(*program);
        put(program, std::ptr::null_mut());
    }
    0
}

/// Declares a function that tells the size of a text, and the one that gives it: an empty string.
macro_rules! texts {
    ($($size:ident / $text:ident;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $size(_program: *const c_void, size: *mut usize) -> c_int {
            // SAFETY: see the crate's contract.
            unsafe { put(size, 1) };
            0
        }

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $text(_program: *const c_void, text: *mut c_char) -> c_int {
            // SAFETY: see the crate's contract.
            unsafe { put(text, 0) };
            0
        }
    )*};
}

texts! {
    nvrtcGetPTXSize / nvrtcGetPTX;
    nvrtcGetCUBINSize / nvrtcGetCUBIN;
    nvrtcGetProgramLogSize / nvrtcGetProgramLog;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetLoweredName(
    _program: *const c_void,
    name: *const c_char,
    lowered: *mut *const c_char,
) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { put(lowered, name) };
    0
}
