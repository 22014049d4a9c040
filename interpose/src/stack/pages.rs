//! Anonymous memory straight from the kernel: the tables must not call the allocator of the traced program.
//!
//! May change `errno`; the caller's guard restores it.

use std::ptr::{self, NonNull};

/// Reserves zeroed memory that costs nothing until it is touched. Page-aligned. `None` when the kernel refuses.
pub(super) fn reserve(bytes: usize) -> Option<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
    let address = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the range was mapped just above. A huge page would make one touched entry cost 2 MiB; where the advice
    // is not taken nothing is lost but memory.
    unsafe { libc::madvise(address, bytes, libc::MADV_NOHUGEPAGE) };
    NonNull::new(address.cast())
}

/// Gives the pages back to the kernel and keeps the addresses: whoever still reads there reads zeros.
///
/// # Safety
/// `start..start + bytes` came from [`reserve`]; nothing in it is needed any more.
pub(super) unsafe fn discard(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller owns the private anonymous range, so dropping its pages loses nothing that is needed.
    unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_DONTNEED) };
}

/// Makes a range larger, at another address if need be. `None`, and nothing changed, when the kernel refuses.
///
/// # Safety
/// `start..start + old_bytes` came from [`reserve`] or [`grow`]; no pointer into it is used afterwards.
pub(super) unsafe fn grow(start: NonNull<u8>, old_bytes: usize, new_bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: the caller owns the range and gives up every pointer into it.
    let address = unsafe { libc::mremap(start.as_ptr().cast(), old_bytes, new_bytes, libc::MREMAP_MAYMOVE) };
    if address == libc::MAP_FAILED { None } else { NonNull::new(address.cast()) }
}

/// Unmaps a range.
///
/// # Safety
/// `start..start + bytes` came from [`reserve`] or [`grow`]; no pointer into it is used afterwards.
#[allow(dead_code, reason = "for tests, the stack probe and whoever wants to know")]
pub(super) unsafe fn release(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller owns the range and gives up every pointer into it.
    unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
}
