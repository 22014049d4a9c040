//! A growing array in pages of its own. The walk must not call the traced program's allocator.

use std::ptr::NonNull;

use super::super::pages;

/// Types for which zeroed memory is a valid value.
///
/// # Safety
///
/// A value whose bytes are all zero is valid.
pub(super) unsafe trait Zeroed: Copy {}

/// A growing array. Plain data without a destructor: only [`Self::release`] frees the memory.
pub(super) struct Array<T> {
    first: *mut T,
    capacity: usize,
}

impl<T: Zeroed> Array<T> {
    pub(super) const fn new() -> Array<T> {
        Array { first: std::ptr::null_mut(), capacity: 0 }
    }

    /// The element at `index`, which must be below the reserved count.
    #[inline]
    pub(super) fn get(&self, index: usize) -> &T {
        debug_assert!(index < self.capacity);
        // SAFETY: callers pass an index below a capacity that they have reserved. The memory is initially zeroed, which
        // is valid for `T`.
        unsafe { &*self.first.add(index) }
    }

    /// The element at `index`, for writing. It must be below the reserved count.
    #[inline]
    pub(super) fn get_mut(&mut self, index: usize) -> &mut T {
        debug_assert!(index < self.capacity);
        // SAFETY: callers pass an index below a capacity that they have reserved. The memory is initially zeroed, which
        // is valid for `T`, and `&mut self` excludes other references.
        unsafe { &mut *self.first.add(index) }
    }

    /// Ensures space for `count` elements. Returns `false` if the kernel refuses memory.
    #[inline]
    pub(super) fn reserve(&mut self, count: usize) -> bool {
        count <= self.capacity || self.grow(count)
    }

    #[cold]
    fn grow(&mut self, count: usize) -> bool {
        let capacity = count.next_power_of_two().max(4096 / size_of::<T>());
        let bytes = capacity * size_of::<T>();
        let memory = match NonNull::new(self.first) {
            None => pages::reserve(bytes),
            // SAFETY: the array comes from this function with the old capacity, and the old pointer is overwritten
            // below.
            Some(old) => unsafe { pages::grow(old.cast(), self.capacity * size_of::<T>(), bytes) },
        };
        let Some(memory) = memory else { return false };
        (self.first, self.capacity) = (memory.as_ptr().cast(), capacity);
        true
    }

    /// Frees the memory.
    pub(super) fn release(&mut self) {
        if let Some(first) = NonNull::new(self.first) {
            // SAFETY: the array comes from `grow` with this capacity, and the pointer is overwritten below.
            unsafe { pages::release(first.cast(), self.capacity * size_of::<T>()) };
        }
        *self = Array::new();
    }
}
