//! Arrays in anonymous memory, for tables that are mostly empty.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Zeroed entries of so many words in anonymous memory, mapped when first used: pages cost memory when they are touched.
pub(super) struct Table<const WORDS: usize> {
    entries: AtomicPtr<[AtomicU64; WORDS]>,
    len: usize,
}

impl<const WORDS: usize> Table<WORDS> {
    pub(super) const fn new(len: usize) -> Self {
        Table { entries: AtomicPtr::new(std::ptr::null_mut()), len }
    }

    /// The array; empty when it cannot be mapped.
    #[inline]
    pub(super) fn entries(&self) -> &[[AtomicU64; WORDS]] {
        let mut entries = self.entries.load(Ordering::Acquire);
        if entries.is_null() {
            entries = self.map();
            if entries.is_null() {
                return &[];
            }
        }
        // SAFETY: `map` made it of this length; it is never unmapped.
        unsafe { std::slice::from_raw_parts(entries, self.len) }
    }

    #[cold]
    fn map(&self) -> *mut [AtomicU64; WORDS] {
        let bytes = self.len * size_of::<[AtomicU64; WORDS]>();
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
        let fresh = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if fresh == libc::MAP_FAILED {
            return std::ptr::null_mut();
        }
        let fresh = fresh.cast::<[AtomicU64; WORDS]>();
        match self.entries.compare_exchange(std::ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(other) => {
                // SAFETY: our own mapping, which nobody has seen.
                unsafe { libc::munmap(fresh.cast(), bytes) };
                other
            }
        }
    }
}
