//! cuBLAS and cuBLASLt: handles, their stream, and one matrix-multiplication algorithm without a workspace.

use crate::support::{Handle, handles};
use simcuda::out::Out;
use std::ffi::{c_int, c_void};

/// `CUBLAS_STATUS_NOT_INITIALIZED`
const INVALID: c_int = 1;

handles! {
    cublasCreate_v2 / cublasDestroy_v2;
    cublasLtCreate / cublasLtDestroy;
    cublasLtMatmulDescCreate / cublasLtMatmulDescDestroy;
    cublasLtMatrixLayoutCreate / cublasLtMatrixLayoutDestroy;
    cublasLtMatmulPreferenceCreate / cublasLtMatmulPreferenceDestroy;
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetStream_v2(handle: Option<&mut Handle>, stream: u64) -> c_int {
    let Some(handle) = handle else { return INVALID };
    handle.stream = stream;
    0
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetStream_v2(handle: Option<&Handle>, stream: Out<u64>) -> c_int {
    stream.put(handle.map_or(0, |h| h.stream));
    0
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetVersion_v2(_handle: *const Handle, version: Out<c_int>) -> c_int {
    version.put(130_100);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetMathMode(_handle: *const Handle, mode: Out<c_int>) -> c_int {
    mode.put(0);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetPointerMode_v2(_handle: *const Handle, mode: Out<c_int>) -> c_int {
    mode.put(0);
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

/// The size of `cublasLtMatmulHeuristicResult_t` in bytes. All zeros mean success and no workspace.
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
    requested: c_int,
    results: *mut u8,
    found: Out<c_int>,
) -> c_int {
    // SAFETY: by the contract of cuBLASLt `results` has space for `requested` results.
    unsafe {
        results.write_bytes(0, requested.max(0) as usize * HEURISTIC_RESULT_BYTES);
        found.put(c_int::from(requested > 0));
    }
    0
}
