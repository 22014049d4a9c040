//! What stream-ordered pools hold of their device: nobody calls for it, a pool grows when it must and shrinks when its threshold,
//! a synchronization or a trim lets it. Told as [`Action::Totals`](memtrace_trace::event::Action::Totals) where it has changed.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use super::device::ask;
use super::location::pointer_attribute;
use crate::real::Original;

/// What a pool says of itself.
#[derive(Clone, Copy)]
pub(super) struct Totals {
    pub(super) pool: u64,
    /// As in [`super::call::Memory::place`].
    pub(super) place: u64,
    pub(super) used: u64,
    pub(super) reserved: u64,
    /// How much more that is than before.
    pub(super) grown: u64,
}

/// Pools that are remembered, with what they held last; those that a process has more are not told.
const KNOWN: usize = 64;
static LAST: [[AtomicU64; 3]; KNOWN] = [const { [const { AtomicU64::new(0) }; 3] }; KNOWN];

/// The pool that memory came from; 0 where there is none.
pub(super) fn of_address(addr: u64) -> u64 {
    /// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE`
    const MEMPOOL_HANDLE: c_int = 17;
    pointer_attribute(MEMPOOL_HANDLE, addr, 0u64).unwrap_or(0)
}

/// What the pool holds, if that has changed since it was asked last. `place` is 0 where the call does not say the device.
pub(super) fn changed(pool: u64, place: u64) -> Option<Totals> {
    /// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` and `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`
    const RESERVED: c_int = 5;
    const USED: c_int = 7;
    if pool == 0 {
        return None;
    }
    let reserved = attribute(pool, RESERVED)?;
    let (before, place) = note(pool, place, reserved).filter(|(before, _)| *before != reserved)?;
    Some(Totals { pool, place, used: attribute(pool, USED)?, reserved, grown: reserved.saturating_sub(before) })
}

/// Remembers what a pool holds; gives what it held before and where it is, `None` where there is no room to remember it.
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
    // SAFETY: `CUresult cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, void *)`; the attributes asked for are 64 bits.
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
