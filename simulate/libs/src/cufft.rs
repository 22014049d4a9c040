//! cuFFT: plans with the workspaces that real ones request, as far as rules give them (`simcuda::cufft`).

use crate::support::load;
use simcuda::cufft::{Plan, Precision};
use simcuda::library_memory::Kernels;
use simcuda::out::Out;
use std::ffi::{c_int, c_void};
use std::slice;
use std::sync::atomic::{AtomicI32, Ordering};

/// `CUFFT_ALLOC_FAILED`
const ALLOC_FAILED: c_int = 2;
/// `CUFFT_INVALID_VALUE`
const INVALID_VALUE: c_int = 4;
/// The maximum number of dimensions.
const MAX_RANK: c_int = 3;

#[unsafe(no_mangle)]
extern "C" fn cufftCreate(plan: Out<c_int>) -> c_int {
    static PLANS: AtomicI32 = AtomicI32::new(0);
    plan.put(PLANS.fetch_add(1, Ordering::Relaxed) + 1);
    0
}

/// The precision of a `cudaDataType`, and whether it is real.
fn element(data_type: c_int) -> (Precision, bool) {
    let precision = match data_type {
        1 | 5 => Precision::Double,
        2 | 6 => Precision::Half,
        _ => Precision::Single,
    };
    (precision, data_type <= 2)
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn cufftXtMakePlanMany(
    _plan: c_int,
    rank: c_int,
    lengths: *const i64,
    _inembed: *const c_void,
    _istride: i64,
    _idist: i64,
    input_type: c_int,
    _onembed: *const c_void,
    _ostride: i64,
    _odist: i64,
    output_type: c_int,
    batch: i64,
    work_size: Out<usize>,
    _execution_type: c_int,
) -> c_int {
    if lengths.is_null() || !(1..=MAX_RANK).contains(&rank) {
        return INVALID_VALUE;
    }
    if !load(Kernels::Cufft) {
        return ALLOC_FAILED;
    }
    // SAFETY: it is not null, and by the contract of cuFFT it has a length for each dimension.
    let lengths = unsafe { slice::from_raw_parts(lengths, rank as usize) };
    let lengths: Vec<u64> = lengths.iter().map(|length| length.unsigned_abs()).collect();
    let (precision, input_is_real) = element(input_type);
    let is_real = input_is_real || element(output_type).1;
    let plan = Plan { is_real, precision, lengths: &lengths, batch: batch.unsigned_abs() };
    work_size.put(plan.workspace() as usize);
    0
}
