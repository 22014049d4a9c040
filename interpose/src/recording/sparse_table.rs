//! Sparse tables in anonymous memory.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use memtrace_stackwalk::{reserve_table, return_table};

/// Zeroed entries of `WORDS` words in anonymous memory, mapped on first use. A page takes physical memory only once it
/// is written.
pub(crate) struct SparseTable<const WORDS: usize> {
    entries: AtomicPtr<[AtomicU64; WORDS]>,
    len: usize,
}

impl<const WORDS: usize> SparseTable<WORDS> {
    /// A table of `len` entries, which maps no memory yet.
    pub(crate) const fn new(len: usize) -> Self {
        SparseTable { entries: AtomicPtr::new(std::ptr::null_mut()), len }
    }

    /// The entries. Empty if they cannot be mapped.
    #[inline]
    pub(crate) fn entries(&self) -> &[[AtomicU64; WORDS]] {
        let mut entries = self.entries.load(Ordering::Acquire);
        if entries.is_null() {
            entries = self.map();
            if entries.is_null() {
                return &[];
            }
        }
        // SAFETY: `map` has mapped `len` entries at this address, and nothing unmaps them. Zeros are valid.
        unsafe { std::slice::from_raw_parts(entries, self.len) }
    }

    #[cold]
    fn map(&self) -> *mut [AtomicU64; WORDS] {
        let bytes = self.len * size_of::<[AtomicU64; WORDS]>();
        let Some(memory) = reserve_table(bytes) else { return std::ptr::null_mut() };
        let mapping = memory.as_ptr().cast::<[AtomicU64; WORDS]>();
        match self.entries.compare_exchange(std::ptr::null_mut(), mapping, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => mapping,
            Err(other) => {
                // SAFETY: no other thread has seen this memory, and it was not written.
                unsafe { return_table(memory, bytes) };
                other
            }
        }
    }
}
