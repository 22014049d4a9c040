//! Reads how much device memory stream-ordered pools hold.
//!
//! No call requests or releases that memory. A pool grows when it must. It shrinks as its release threshold, a
//! synchronization or a trim allows. A change becomes an [`Action::Totals`](memtrace_trace::event::Action::Totals)
//! event.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use super::device::ask;
use super::location::pointer_attribute;
use crate::real::Original;

/// The attributes of a pool. Sizes are in bytes.
#[derive(Clone, Copy)]
pub(super) struct Totals {
    pub(super) pool: u64,
    /// Encoded as [`super::call::Memory::place`].
    pub(super) place: u64,
    pub(super) used: u64,
    pub(super) reserved: u64,
    /// How much `reserved` has grown since the last query.
    pub(super) grown: u64,
}

/// At most this many pools are remembered. Further ones are not reported.
const KNOWN: usize = 64;
/// For each pool: its handle, the bytes it last held, and its place.
static LAST: [[AtomicU64; 3]; KNOWN] = [const { [const { AtomicU64::new(0) }; 3] }; KNOWN];

/// The handle of the pool that this memory came from, 0 if none.
pub(super) fn of_address(addr: u64) -> u64 {
    /// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE` of cuda.h.
    const MEMPOOL_HANDLE: c_int = 17;
    pointer_attribute(MEMPOOL_HANDLE, addr, 0u64).unwrap_or(0)
}

/// The pool's totals. `None` if its size has not changed since the last query, or the pool cannot be queried. `place`
/// is 0 if the call does not name the device.
pub(super) fn changed(pool: u64, place: u64) -> Option<Totals> {
    /// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` and `CU_MEMPOOL_ATTR_USED_MEM_CURRENT` of cuda.h.
    const RESERVED: c_int = 5;
    const USED: c_int = 7;
    if pool == 0 {
        return None;
    }
    let reserved = attribute(pool, RESERVED)?;
    let (before, place) = note(pool, place, reserved).filter(|(before, _)| *before != reserved)?;
    Some(Totals { pool, place, used: attribute(pool, USED)?, reserved, grown: reserved.saturating_sub(before) })
}

/// Remembers the bytes that a pool holds. Returns the bytes it held before and its place. `None` if [`KNOWN`] other
/// pools are remembered.
fn note(pool: u64, place: u64, reserved: u64) -> Option<(u64, u64)> {
    for known_pool in &LAST {
        let [handle, held, here] = known_pool;
        let known = match handle.compare_exchange(0, pool, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => pool,
            Err(known) => known,
        };
        if known == pool {
            if place != 0 {
                here.store(place, Ordering::Relaxed);
            }
            return Some((held.swap(reserved, Ordering::Relaxed), here.load(Ordering::Relaxed)));
        }
    }
    None
}

fn attribute(pool: u64, which: c_int) -> Option<u64> {
    static GET_ATTRIBUTE: Original = Original::new();
    let mut value = 0u64;
    // SAFETY: cuda.h declares `CUresult cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, void *)`, and both
    // attributes have 64 bits.
    let result = unsafe {
        ask(&GET_ATTRIBUTE, c"cuMemPoolGetAttribute", |get: unsafe extern "C" fn(u64, c_int, *mut u64) -> c_int| {
            get(pool, which, &mut value)
        })
    };
    (result == Some(0)).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pool_has_its_own_past() {
        assert_eq!((note(0x77, 1, 32), note(0x78, 2, 64)), (Some((0, 1)), Some((0, 2))));
        assert_eq!((note(0x77, 0, 2), note(0x77, 0, 2)), (Some((32, 1)), Some((2, 1))));
        let remembered = (0x100..0x100 + KNOWN as u64).filter(|pool| note(*pool, 1, 1).is_some()).count();
        assert_eq!(remembered, KNOWN - 2);
        assert_eq!(note(0x78, 0, 1), Some((64, 2)));
    }
}
