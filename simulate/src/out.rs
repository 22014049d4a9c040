//! Out-pointers of C functions.

/// A pointer to which the caller wants a result written, or null when the caller does not want the result.
///
/// The exported functions take this type instead of bare pointers. A value is created only from an argument of a C
/// caller or from a Rust reference. CUDA's contract says that a non-null out-pointer can be written, and only this
/// module relies on it.
#[derive(Debug)]
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> From<&mut T> for Out<T> {
    fn from(place: &mut T) -> Self {
        Out(place)
    }
}

impl<T> Out<T> {
    /// The null pointer: the result is not wanted.
    pub const NONE: Self = Out(std::ptr::null_mut());

    /// Whether the result is not wanted.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Writes the result if it is wanted. The pointer may be unaligned.
    pub fn put(self, value: T) {
        if !self.is_null() {
            // SAFETY: the pointer is not null. It comes from a Rust reference, or from a C caller whose contract makes
            // it valid for writes.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Reads the value that the caller stored, for an argument that is input and output. `None` for a null pointer.
    pub fn get(self) -> Option<T>
    where
        T: Copy,
    {
        // SAFETY: the pointer is not null. It comes from a Rust reference, or from a C caller whose contract makes it
        // valid for reads and writes.
        (!self.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }

    /// The n-th element of an array. The caller's other arguments give the array's length.
    pub fn nth(self, n: usize) -> Self {
        if self.is_null() { self } else { Out(self.0.wrapping_add(n)) }
    }

    /// The same pointer with another type. The caller's other arguments determine the type.
    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_outputs_are_not_written() {
        let mut place = 1;
        Out::from(&mut place).put(2);
        Out::<i32>::NONE.put(3);
        assert_eq!(place, 2);
        assert_eq!((Out::from(&mut place).get(), Out::<i32>::NONE.get()), (Some(2), None));
        let mut list = [0u16; 3];
        Out::from(&mut list).cast::<u16>().nth(2).put(7);
        assert_eq!(list, [0, 0, 7]);
    }
}
