//! Makes the records of the loader visible that another thread has appended to the list.
//!
//! The loader fills in a record and then links it to the list, with plain stores. The lock that it takes meanwhile
//! orders them for those who take it, too, which a hook must not do. x86-64 shows stores in the order in which they
//! were made, so a reader that sees the link sees the record. AArch64 does not: the link may be visible first, and then
//! the record's pointers are whatever the memory contained before.
//!
//! The protocol there: a reader that meets a record for the first time lets the kernel execute a full barrier on every
//! processor that runs a thread of this process (membarrier(2)). The stores to the record precede that of the link in
//! program order, and the reader has seen the link. So they have been made when the barrier has been executed on the
//! loader's processor. The reader reads the record after the call, so it sees them. Records are appended, so a number
//! says which ones are known. An unload invalidates it.
//!
//! Without the kernel's barrier (before a recording has found out that the program's seccomp filter permits it, and
//! where it does not) a record is read as it is. The objects of then were loaded before the program started, by the
//! thread that runs this constructor. For others the window is that of one store buffer, some hundred nanoseconds after
//! the loader has linked the record. Two cases are not detected: those of [`super::unloads`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::super::arch;
use super::unloads;

/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED` and `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED` of linux/membarrier.h.
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

static BARRIERS_PERMITTED: AtomicBool = AtomicBool::new(false);
/// How many records from the beginning of the list are visible, and in the upper half the number of unloads.
static VISIBLE: AtomicU64 = AtomicU64::new(0);

/// Permits barriers in all threads: the program's seccomp filter does not kill it for them.
pub fn permit_barriers() {
    BARRIERS_PERMITTED.store(true, Ordering::Relaxed);
}

/// Executes a full memory barrier in every thread of this process. Another thread that sees a later store of this one
/// also sees all earlier ones. Does nothing where the processor keeps the order of stores, and
/// without permission.
pub fn barrier_in_all_threads() {
    if arch::KEEPS_ORDER_OF_STORES || !BARRIERS_PERMITTED.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: these commands take no pointer. A process must register before its first barrier.
    unsafe {
        if libc::syscall(libc::SYS_membarrier, PRIVATE_EXPEDITED, 0, 0) != 0 {
            libc::syscall(libc::SYS_membarrier, REGISTER_PRIVATE_EXPEDITED, 0, 0);
            libc::syscall(libc::SYS_membarrier, PRIVATE_EXPEDITED, 0, 0);
        }
    }
}

/// Makes the record at `index` of the list visible, whose address this thread has just read. `errno` may change.
#[inline]
pub(super) fn make_visible(index: usize) {
    if !arch::KEEPS_ORDER_OF_STORES {
        make_visible_by_barrier(index);
    }
}

fn make_visible_by_barrier(index: usize) {
    let unloads = unloads::count();
    let of_unloads = |word: u64| Some((word >> 32) as u32) == unloads;
    // Acquire: whoever stored this number has executed the barrier before.
    let visible = VISIBLE.load(Ordering::Acquire);
    if of_unloads(visible) && index < visible as u32 as usize {
        return;
    }
    barrier_in_all_threads();
    if let Some(unloads) = unloads {
        VISIBLE.store(u64::from(unloads) << 32 | (index as u64 + 1), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_made_visible_once() {
        permit_barriers();
        make_visible_by_barrier(5);
        let visible = VISIBLE.load(Ordering::Relaxed);
        assert!(visible as u32 >= 6);
        make_visible_by_barrier(3);
        assert!(VISIBLE.load(Ordering::Relaxed) as u32 >= 6, "known already");
        barrier_in_all_threads();
    }
}
