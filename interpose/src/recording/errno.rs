//! Keeps the program's `errno`.

/// Restores the calling thread's `errno` when it is dropped. For code that runs in the program's own time without a
/// [`Guard`](super::guard::Guard), which does the same.
pub(crate) struct RestoreErrno {
    errno: i32,
    /// Makes the type neither `Send` nor `Sync`.
    _not_send: std::marker::PhantomData<*const ()>,
}

/// The address of the calling thread's `errno`.
fn location() -> *mut i32 {
    // SAFETY: `__errno_location` takes no arguments and has no preconditions.
    unsafe { libc::__errno_location() }
}

impl RestoreErrno {
    /// Remembers the present value.
    pub(crate) fn new() -> RestoreErrno {
        // SAFETY: the address is the calling thread's own `errno`, which lives as long as the thread.
        RestoreErrno { errno: unsafe { *location() }, _not_send: std::marker::PhantomData }
    }
}

impl Drop for RestoreErrno {
    fn drop(&mut self) {
        // SAFETY: the address is the calling thread's own `errno`, and this value never leaves its thread.
        unsafe { *location() = self.errno };
    }
}
