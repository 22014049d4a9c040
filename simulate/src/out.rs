//! Out-pointers of C functions.

/// Where a caller wants a result written; null where it does not want it.
///
/// The stand-ins' exported functions take these in place of bare pointers. One comes into being only as an argument from
/// C, or out of a reference of ours; so CUDA's contract, that a non-null out-pointer can be written, is relied upon here
/// and nowhere else.
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
    /// Not wanted.
    pub const NONE: Self = Out(std::ptr::null_mut());

    /// Whether the result is not wanted.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Writes the result if it is wanted. The pointer need not be aligned.
    pub fn put(self, value: T) {
        if !self.is_null() {
            // SAFETY: not null, and from a caller that promises it can be written (see the type).
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// What the caller has put there, for an argument that goes both ways; None where there is no place.
    pub fn get(self) -> Option<T>
    where
        T: Copy,
    {
        // SAFETY: not null, and from a caller that promises it can be read and written.
        (!self.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }

    /// The n-th place of a list; the caller says elsewhere how many there are.
    pub fn nth(self, n: usize) -> Self {
        if self.is_null() { self } else { Out(self.0.wrapping_add(n)) }
    }

    /// The same place as one of another type: the caller's own arguments say which type it is.
    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_only_if_wanted() {
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
