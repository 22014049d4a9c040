//! NCCL. Ranks exchange small data: sizes, flags, pickled objects, which programs depend on. For large data, and for
//! reductions of floating-point numbers, every rank is assumed to have the same data, because kernels do not run
//! anyway: a collective copies this rank's own data, and no rank waits for another.

mod collectives;
mod communicator;
mod messages;

use crate::support::bridge;
use std::ffi::c_int;
use std::slice;

/// `ncclInvalidArgument`
const INVALID: c_int = 4;

/// Copies `bytes` bytes as work of a stream. Does nothing for null pointers.
///
/// # Safety
/// `from` is null or valid for reads of `bytes` bytes, and `to` is null or valid for writes of as many.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize, stream: u64) -> c_int {
    let Some(bridge) = bridge() else { return 0 };
    if from.is_null() || to.is_null() || std::ptr::eq(from, to) {
        return (bridge.launch)(stream);
    }
    // SAFETY: the caller guarantees that both buffers are valid for `bytes` bytes.
    unsafe { (bridge.copy)(to as u64, from as u64, bytes, stream) }
}

/// The bytes of a buffer on a device, which other ranks get.
///
/// # Safety
/// `from` is null or valid for reads of `bytes` bytes.
unsafe fn content(from: *const u8, bytes: usize) -> Vec<u8> {
    // SAFETY: the caller guarantees it.
    if from.is_null() { Vec::new() } else { unsafe { slice::from_raw_parts(from, bytes) }.to_vec() }
}
