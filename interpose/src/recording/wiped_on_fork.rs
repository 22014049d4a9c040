//! A static byte that the kernel clears in every forked child, no matter how the child was created.

use std::sync::atomic::AtomicU8;

use crate::arch::{LARGEST_PAGE, PageAligned};

/// The byte, on a page of its own. It begins with 0, so the loader puts it into memory that belongs to no file.
pub(crate) struct WipedOnFork(AtomicU8, [PageAligned; 0]);

const _: () = assert!(size_of::<WipedOnFork>() == LARGEST_PAGE && align_of::<WipedOnFork>() == LARGEST_PAGE);

impl WipedOnFork {
    pub(crate) const fn new() -> WipedOnFork {
        WipedOnFork(AtomicU8::new(0), [])
    }

    /// The byte.
    #[inline(always)]
    pub(crate) fn get(&'static self) -> &'static AtomicU8 {
        &self.0
    }

    /// Lets the kernel clear the byte in children that are forked from now on. Without permission it stays in them as
    /// it is.
    pub(crate) fn wipe_in_children(&'static self) {
        // SAFETY: the page contains nothing but this byte and padding, and 0 is a valid value. The contents stay in
        // this process. The call fails for memory that belongs to a file.
        unsafe { libc::madvise(std::ptr::from_ref(self).cast_mut().cast(), LARGEST_PAGE, libc::MADV_WIPEONFORK) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn the_byte_is_0_in_a_child() {
        static BYTE: WipedOnFork = WipedOnFork::new();
        static OTHER: WipedOnFork = WipedOnFork::new();
        BYTE.wipe_in_children();
        BYTE.get().store(7, Ordering::Relaxed);
        OTHER.get().store(7, Ordering::Relaxed);
        // SAFETY: the child only reads memory and ends. `status` is writable.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                let [byte, other] = [&BYTE, &OTHER].map(|byte| i32::from(byte.get().load(Ordering::Relaxed)));
                libc::_exit(byte << 4 | other);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        };
        assert_eq!((libc::WEXITSTATUS(status), BYTE.get().load(Ordering::Relaxed)), (7, 7));
    }
}
