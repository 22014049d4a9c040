//! NVRTC: every program compiles, and the result is empty.

use crate::support::{Handle, create};
use simcuda::out::Out;
use std::ffi::{c_char, c_int, c_void};

#[unsafe(no_mangle)]
extern "C" fn nvrtcVersion(major: Out<c_int>, minor: Out<c_int>) -> c_int {
    major.put(13);
    minor.put(0);
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(_status: c_int) -> *const c_char {
    c"simulated NVRTC status".as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcCreateProgram(out: Out<Box<Handle>>) -> c_int {
    create(out)
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcDestroyProgram(program: Option<&mut Option<Box<Handle>>>) -> c_int {
    if let Some(program) = program {
        *program = None;
    }
    0
}

/// Declares a function that returns the size of a text, and one that returns the text, an empty string.
macro_rules! texts {
    ($($size:ident / $text:ident;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $size(_program: *const c_void, size: Out<usize>) -> c_int {
            size.put(1);
            0
        }

        #[unsafe(no_mangle)]
        extern "C" fn $text(_program: *const c_void, text: Out<c_char>) -> c_int {
            text.put(0);
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
extern "C" fn nvrtcGetLoweredName(_program: *const c_void, name: *const c_char, lowered: Out<*const c_char>) -> c_int {
    lowered.put(name);
    0
}
