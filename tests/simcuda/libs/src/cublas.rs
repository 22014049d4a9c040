//! cuBLAS and cuBLASLt: handles, their stream, and one matrix-multiplication algorithm without a workspace.

use crate::support::{Handle, handles, put};
use std::ffi::{c_int, c_void};

handles! {
    cublasCreate_v2 / cublasDestroy_v2;
    cublasLtCreate / cublasLtDestroy;
    cublasLtMatmulPreferenceCreate / cublasLtMatmulPreferenceDestroy;
}

/// Both descriptors are made with types as further arguments, which nobody asks back.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescCreate(out: *mut *mut Handle) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { crate::support::create(out) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescDestroy(handle: *mut Handle) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { crate::support::destroy(handle) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutCreate(out: *mut *mut Handle) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { crate::support::create(out) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutDestroy(handle: *mut Handle) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { crate::support::destroy(handle) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasSetStream_v2(handle: *mut Handle, stream: u64) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { (*handle).stream = stream };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGetStream_v2(handle: *const Handle, stream: *mut u64) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { put(stream, (*handle).stream) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGetVersion_v2(_handle: *const Handle, version: *mut c_int) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { put(version, 130_100) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGetMathMode(_handle: *const Handle, mode: *mut c_int) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { put(mode, 0) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasGetPointerMode_v2(_handle: *const Handle, mode: *mut c_int) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { put(mode, 0) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetVersion() -> usize {
    130_100
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetCudartVersion() -> usize {
    13000
}

/// `cublasLtMatmulHeuristicResult_t`: 96 bytes, of which zero means success and no workspace.
const HEURISTIC_RESULT_BYTES: usize = 96;

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: *const c_void,
    _operation: *const c_void,
    _a: *const c_void,
    _b: *const c_void,
    _c: *const c_void,
    _d: *const c_void,
    _preference: *const c_void,
    wanted: c_int,
    results: *mut u8,
    found: *mut c_int,
) -> c_int {
    // SAFETY: see the crate's contract: `results` has room for `wanted` of them.
    unsafe {
        results.write_bytes(0, wanted.max(0) as usize * HEURISTIC_RESULT_BYTES);
        put(found, c_int::from(wanted > 0));
    }
    0
}
