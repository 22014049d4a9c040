//! Reads how much device memory is in stream-ordered pools.
//!
//! No call requests or releases that memory. A pool grows when it must. It shrinks as its release threshold, a
//! synchronization or a trim allows. A change becomes an [`Action::Totals`](memtrace_trace::event::Action::Totals)
//! event.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use super::driver::call_driver;
use super::location::pointer_attribute;
use crate::linker::original::OriginalFunction;

/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` and `CU_MEMPOOL_ATTR_USED_MEM_CURRENT` of cuda.h.
const RESERVED: c_int = 5;
const USED: c_int = 7;

/// The attributes of a pool. Sizes are in bytes.
#[derive(Clone, Copy)]
pub(super) struct PoolTotals {
    pub(super) pool: u64,
    /// Encoded as [`super::memory::CallMemory::location`].
    pub(super) location: u64,
    pub(super) used: u64,
    pub(super) reserved: u64,
    /// How much `reserved` has grown since the last query.
    pub(super) growth: u64,
}

/// At most this many pools are remembered. Further ones are not reported.
const MAX_POOLS: usize = 64;
/// For each pool: its handle, the bytes in it at the last query, and its location.
static LAST_SIZES: [[AtomicU64; 3]; MAX_POOLS] = [const { [const { AtomicU64::new(0) }; 3] }; MAX_POOLS];

/// The handle of the pool that this memory came from, 0 if none.
pub(super) fn of_address(addr: u64) -> u64 {
    /// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE` of cuda.h.
    const MEMPOOL_HANDLE: c_int = 17;
    pointer_attribute(MEMPOOL_HANDLE, addr, 0u64).unwrap_or(0)
}

/// The pool's totals. `None` if its size has not changed since the last query, or the pool cannot be queried.
/// `location` is 0 if the call does not name the device.
pub(super) fn changed_totals(pool: u64, location: u64) -> Option<PoolTotals> {
    if pool == 0 {
        return None;
    }
    let reserved = attribute(pool, RESERVED)?;
    let (before, location) = remember(pool, location, reserved).filter(|(before, _)| *before != reserved)?;
    Some(PoolTotals { pool, location, used: attribute(pool, USED)?, reserved, growth: reserved.saturating_sub(before) })
}

/// Stores how many bytes are in a pool. Returns the number before and the pool's location. `None` if [`MAX_POOLS`]
/// other pools are remembered.
fn remember(pool: u64, location: u64, reserved: u64) -> Option<(u64, u64)> {
    for entry in &LAST_SIZES {
        let [handle, size, pool_location] = entry;
        let known = match handle.compare_exchange(0, pool, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => pool,
            Err(known) => known,
        };
        if known == pool {
            if location != 0 {
                pool_location.store(location, Ordering::Relaxed);
            }
            return Some((size.swap(reserved, Ordering::Relaxed), pool_location.load(Ordering::Relaxed)));
        }
    }
    None
}

/// The pool from which `cuMemAllocAsync` takes memory of this device. 0 if the driver has none.
pub(super) fn of_device(device: i16) -> u64 {
    static GET_POOL: OriginalFunction = OriginalFunction::new();
    let mut pool = 0u64;
    // SAFETY: cuda.h declares `CUresult cuDeviceGetMemPool(CUmemoryPool *, CUdevice)`, and `pool` is writable.
    let result = unsafe {
        call_driver(&GET_POOL, c"cuDeviceGetMemPool", |get: unsafe extern "C" fn(*mut u64, c_int) -> c_int| {
            get(&mut pool, device.into())
        })
    };
    if result == Some(0) { pool } else { 0 }
}

/// The bytes that a pool holds. 0 for none.
pub(super) fn reserved_bytes(pool: u64) -> u64 {
    if pool == 0 { 0 } else { attribute(pool, RESERVED).unwrap_or(0) }
}

/// The bytes that a pool holds and nobody uses.
pub(super) fn unused_bytes(pool: u64) -> u64 {
    let used = if pool == 0 { None } else { attribute(pool, USED) };
    used.map_or(0, |used| reserved_bytes(pool).saturating_sub(used))
}

/// Gives back what a pool does not use, down to `keep` bytes.
pub(super) fn trim(pool: u64, keep: u64) {
    static TRIM: OriginalFunction = OriginalFunction::new();
    if pool != 0 {
        // SAFETY: cuda.h declares `CUresult cuMemPoolTrimTo(CUmemoryPool, size_t)`. The caller's pool exists.
        unsafe {
            call_driver(&TRIM, c"cuMemPoolTrimTo", |trim: unsafe extern "C" fn(u64, usize) -> c_int| {
                trim(pool, keep as usize)
            });
        }
    }
}

/// Waits for a stream, so that the memory that was released there is unused.
pub(super) fn synchronize(stream: u64) {
    static SYNCHRONIZE: OriginalFunction = OriginalFunction::new();
    // SAFETY: cuda.h declares `CUresult cuStreamSynchronize(CUstream)`. The program uses this stream.
    unsafe {
        call_driver(&SYNCHRONIZE, c"cuStreamSynchronize", |wait: unsafe extern "C" fn(u64) -> c_int| wait(stream));
    }
}

/// Whether a stream is being captured into a graph, or the driver cannot say it.
pub(super) fn is_capturing(stream: u64) -> bool {
    static IS_CAPTURING: OriginalFunction = OriginalFunction::new();
    let mut status: c_int = 0;
    // SAFETY: cuda.h declares `CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *)`, and `status` is
    // writable.
    let result = unsafe {
        call_driver(&IS_CAPTURING, c"cuStreamIsCapturing", |get: unsafe extern "C" fn(u64, *mut c_int) -> c_int| {
            get(stream, &mut status)
        })
    };
    result.is_some_and(|result| result != 0) || status != 0
}

fn attribute(pool: u64, which: c_int) -> Option<u64> {
    static GET_ATTRIBUTE: OriginalFunction = OriginalFunction::new();
    let mut value = 0u64;
    // SAFETY: cuda.h declares `CUresult cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, void *)`, and both
    // attributes have 64 bits.
    let result = unsafe {
        call_driver(
            &GET_ATTRIBUTE,
            c"cuMemPoolGetAttribute",
            |get: unsafe extern "C" fn(u64, c_int, *mut u64) -> c_int| get(pool, which, &mut value),
        )
    };
    (result == Some(0)).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pool_keeps_its_own_size() {
        assert_eq!((remember(0x77, 1, 32), remember(0x78, 2, 64)), (Some((0, 1)), Some((0, 2))));
        assert_eq!((remember(0x77, 0, 2), remember(0x77, 0, 2)), (Some((32, 1)), Some((2, 1))));
        let stored = (0x100..0x100 + MAX_POOLS as u64).filter(|pool| remember(*pool, 1, 1).is_some()).count();
        assert_eq!(stored, MAX_POOLS - 2);
        assert_eq!(remember(0x78, 0, 1), Some((64, 2)));
    }
}
