//! cuBLAS and cuBLASLt: handles, their stream, and one matrix-multiplication algorithm without a workspace.

use crate::device_memory::LinearMemory;
use crate::support::{CUBLAS_ALLOC_FAILED, Handle, handles, takes_memory};
use simcuda::library_memory::CUBLAS_HANDLE_BYTES;
use simcuda::out::Out;
use std::ffi::{c_int, c_void};

/// `CUBLAS_STATUS_NOT_INITIALIZED`
const INVALID: c_int = 1;

/// The object to which a `cublasHandle_t` points.
#[derive(Default)]
#[repr(C)]
struct Library {
    /// The handle that PyTorch passes to cuBLASLt, too.
    handle: Handle,
    /// The memory that the handle allocates for itself.
    memory: Vec<LinearMemory>,
}

/// Creates a handle. As in the real library, it allocates device memory.
#[unsafe(no_mangle)]
extern "C" fn cublasCreate_v2(out: Out<Box<Library>>) -> c_int {
    let sizes = if takes_memory() { &CUBLAS_HANDLE_BYTES[..] } else { &[] };
    let Some(memory) = sizes.iter().map(|bytes| LinearMemory::allocate(*bytes)).collect() else {
        return CUBLAS_ALLOC_FAILED;
    };
    out.put(Box::new(Library { handle: Handle::default(), memory }));
    0
}

#[unsafe(no_mangle)]
extern "C" fn cublasDestroy_v2(handle: Option<Box<Library>>) -> c_int {
    drop(handle);
    0
}

handles! {
    cublasLtCreate / cublasLtDestroy;
    cublasLtMatmulDescCreate / cublasLtMatmulDescDestroy;
    cublasLtMatrixLayoutCreate / cublasLtMatrixLayoutDestroy;
    cublasLtMatmulPreferenceCreate / cublasLtMatmulPreferenceDestroy;
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetStream_v2(library: Option<&mut Library>, stream: u64) -> c_int {
    let Some(library) = library else { return INVALID };
    library.handle.stream = stream;
    0
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetStream_v2(library: Option<&Library>, stream: Out<u64>) -> c_int {
    stream.put(library.map_or(0, |library| library.handle.stream));
    0
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetVersion_v2(_handle: *const Library, version: Out<c_int>) -> c_int {
    version.put(130_100);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetMathMode(_handle: *const Library, mode: Out<c_int>) -> c_int {
    mode.put(0);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetPointerMode_v2(_handle: *const Library, mode: Out<c_int>) -> c_int {
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
