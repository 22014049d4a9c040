//! cuSPARSE and cuSOLVER: handles. `simcuda-build` generates the functions that return a size or create other objects.

use crate::support::handles;
use std::ffi::{c_char, c_int};

handles! {
    cusparseCreate / cusparseDestroy;
    cusolverDnCreate / cusolverDnDestroy;
}

#[unsafe(no_mangle)]
extern "C" fn cusparseGetErrorString(_status: c_int) -> *const c_char {
    c"simulated cuSPARSE status".as_ptr()
}
