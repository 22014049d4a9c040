//! A growing array in pages of its own: the walk may not call the traced program's allocator.

use std::ptr::NonNull;

use super::super::pages;

/// What may be made of zeroed memory.
///
/// # Safety
/// All bytes zero is a valid value.
pub(super) unsafe trait Zeroed: Copy {}

/// See the module. Plain data: nothing is given back unless [`Self::release`] is called.
pub(super) struct Array<T> {
    first: *mut T,
    capacity: usize,
}

impl<T: Zeroed> Array<T> {
    pub(super) const fn new() -> Array<T> {
        Array { first: std::ptr::null_mut(), capacity: 0 }
    }

    /// The element at `index`, which must have been reserved.
    #[inline]
    pub(super) fn get(&self, index: usize) -> &T {
        debug_assert!(index < self.capacity);
        // SAFETY: every caller stays below a capacity that it has made sure of; the memory began zeroed.
        unsafe { &*self.first.add(index) }
    }

    /// The same, to be written.
    #[inline]
    pub(super) fn get_mut(&mut self, index: usize) -> &mut T {
        debug_assert!(index < self.capacity);
        // SAFETY: as above; the array is ours alone.
        unsafe { &mut *self.first.add(index) }
    }

    /// Makes room for `count` elements. False when the kernel gives no memory.
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
            // SAFETY: the array came from here with the old capacity; the old pointer is replaced below.
            Some(old) => unsafe { pages::grow(old.cast(), self.capacity * size_of::<T>(), bytes) },
        };
        let Some(memory) = memory else { return false };
        (self.first, self.capacity) = (memory.as_ptr().cast(), capacity);
        true
    }

    /// Gives the memory back.
    pub(super) fn release(&mut self) {
        if let Some(first) = NonNull::new(self.first) {
            // SAFETY: the array came from `grow` with this capacity; the pointer is forgotten below.
            unsafe { pages::release(first.cast(), self.capacity * size_of::<T>()) };
        }
        *self = Array::new();
    }
}
