//! Arrays in anonymous memory, for tables that are mostly empty.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// A zeroed array of words in anonymous memory, mapped when first used: pages cost memory when they are touched.
pub(super) struct Table {
    words: AtomicPtr<AtomicU64>,
    len: usize,
}

impl Table {
    pub(super) const fn new(len: usize) -> Table {
        Table { words: AtomicPtr::new(std::ptr::null_mut()), len }
    }

    /// The array; empty when it cannot be mapped.
    #[inline]
    pub(super) fn words(&self) -> &[AtomicU64] {
        let mut words = self.words.load(Ordering::Acquire);
        if words.is_null() {
            words = self.map();
            if words.is_null() {
                return &[];
            }
        }
        // SAFETY: `map` made it of this length; it is never unmapped.
        unsafe { std::slice::from_raw_parts(words, self.len) }
    }

    #[cold]
    fn map(&self) -> *mut AtomicU64 {
        let bytes = self.len * size_of::<AtomicU64>();
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
        let fresh = fresh.cast::<AtomicU64>();
        match self.words.compare_exchange(std::ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(other) => {
                // SAFETY: our own mapping, which nobody has seen.
                unsafe { libc::munmap(fresh.cast(), bytes) };
                other
            }
        }
    }
}
