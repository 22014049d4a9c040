//! Keeps a pending thread cancellation (`pthread_cancel`) out of our own system calls.
//!
//! Many functions of the C library are cancellation points, `connect`, `read` and `nanosleep` among them. In one of
//! them, a thread whose cancellation was requested would end inside the hook, and the original would never be called.
//! So the slow paths that call such functions hold a [`NoCancellation`]. The request stays pending, and the thread ends
//! at the program's own next cancellation point.
//!
//! Asynchronous cancellation may end a thread at any instruction. POSIX allows a program to enable it only around
//! functions that are safe then, and no call of CUDA is.

use std::ffi::c_int;

/// `PTHREAD_CANCEL_ENABLE` and `PTHREAD_CANCEL_DISABLE` of the C library's pthread.h.
const ENABLE: c_int = 0;
const DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// While it lives, no cancellation takes effect on the calling thread. Dropping it restores the state before.
pub(crate) struct NoCancellation {
    before: c_int,
    /// Makes the type neither `Send` nor `Sync`.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl NoCancellation {
    /// Disables cancellation.
    pub(crate) fn new() -> NoCancellation {
        // The C library before 2.34 writes nothing if the process has no threads.
        let mut before = ENABLE;
        // SAFETY: `before` is writable, and `DISABLE` is a valid state, so the call cannot fail.
        unsafe { pthread_setcancelstate(DISABLE, &mut before) };
        NoCancellation { before, _not_send: std::marker::PhantomData }
    }
}

impl Drop for NoCancellation {
    fn drop(&mut self) {
        // SAFETY: `before` is the state that `new` got on this thread. A null pointer discards the present state. With
        // deferred cancellation, which alone the program may use here, the call is no cancellation point.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The present state.
    fn state() -> c_int {
        let mut state = 0;
        // SAFETY: `state` is writable. The second call restores what the first one has changed.
        unsafe {
            pthread_setcancelstate(DISABLE, &mut state);
            pthread_setcancelstate(state, std::ptr::null_mut());
        }
        state
    }

    #[test]
    fn the_state_before_is_restored() {
        assert_eq!(state(), ENABLE);
        {
            let _outer = NoCancellation::new();
            {
                let _inner = NoCancellation::new();
                assert_eq!(state(), DISABLE);
            }
            assert_eq!(state(), DISABLE);
        }
        assert_eq!(state(), ENABLE);
    }
}
