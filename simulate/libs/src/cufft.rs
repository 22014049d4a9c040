//! cuFFT: plans without a workspace.

use crate::support::load;
use simcuda::library_memory::Kernels;
use simcuda::out::Out;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};

/// `CUFFT_ALLOC_FAILED`
const ALLOC_FAILED: c_int = 2;

#[unsafe(no_mangle)]
extern "C" fn cufftCreate(plan: Out<c_int>) -> c_int {
    static PLANS: AtomicI32 = AtomicI32::new(0);
    plan.put(PLANS.fetch_add(1, Ordering::Relaxed) + 1);
    0
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
extern "C" fn cufftXtMakePlanMany(
    _plan: c_int,
    _rank: c_int,
    _n: *const c_void,
    _inembed: *const c_void,
    _istride: i64,
    _idist: i64,
    _input_type: c_int,
    _onembed: *const c_void,
    _ostride: i64,
    _odist: i64,
    _output_type: c_int,
    _batch: i64,
    work_size: Out<usize>,
    _execution_type: c_int,
) -> c_int {
    if !load(Kernels::Cufft) {
        return ALLOC_FAILED;
    }
    work_size.put(0);
    0
}
