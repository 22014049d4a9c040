//! Anonymous memory from the kernel. The tables must not call the traced program's allocator.
//!
//! These functions may change `errno`, which the caller's guard restores.

use std::ptr::{self, NonNull};

/// The size of a page in bytes: 4096 on x86-64, and 4096, 16384 or 65536 on AArch64, as the kernel was built.
pub fn page_size() -> usize {
    // SAFETY: `getauxval` takes any number.
    let bytes = unsafe { libc::getauxval(libc::AT_PAGESZ) } as usize;
    if bytes.is_power_of_two() { bytes } else { 4096 }
}

/// Reserves zeroed, page-aligned memory that takes no physical memory until it is used. `None` if the kernel refuses.
pub(super) fn reserve(bytes: usize) -> Option<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: an anonymous mapping at an address that the kernel chooses affects no existing memory.
    let address = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the range was just mapped. A huge page would make one used entry cost 2 MiB. If the kernel ignores the
    // advice, only memory is lost.
    unsafe { libc::madvise(address, bytes, libc::MADV_NOHUGEPAGE) };
    NonNull::new(address.cast())
}

/// Returns the pages to the kernel and keeps the addresses mapped. Later reads there return zeros.
///
/// # Safety
///
/// `start..start + bytes` comes from [`reserve`], and its contents are not needed any more.
pub(super) unsafe fn discard(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller owns this private anonymous range and guarantees that its contents are not needed.
    unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_DONTNEED) };
}

/// Enlarges a range and moves it if necessary. `None` if the kernel refuses, which leaves the range unchanged.
///
/// # Safety
///
/// `start..start + old_bytes` comes from [`reserve`] or [`grow`], and no pointer into it is used afterwards.
pub(super) unsafe fn grow(start: NonNull<u8>, old_bytes: usize, new_bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: the caller owns the range and gives up every pointer into it.
    let address = unsafe { libc::mremap(start.as_ptr().cast(), old_bytes, new_bytes, libc::MREMAP_MAYMOVE) };
    if address == libc::MAP_FAILED { None } else { NonNull::new(address.cast()) }
}

/// Unmaps a range.
///
/// # Safety
///
/// `start..start + bytes` comes from [`reserve`] or [`grow`], and no pointer into it is used afterwards.
pub(super) unsafe fn release(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller owns the range and gives up every pointer into it.
    unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
}
