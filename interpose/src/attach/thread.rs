//! Threads of ours in the traced process.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

/// Starts a thread that no signal of the program reaches.
pub(super) fn start(run: extern "C" fn(*mut c_void) -> *mut c_void) -> bool {
    // SAFETY: the sets and the attributes are initialized before their use. The thread's function takes no argument.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
        let mut thread = 0;
        let is_started = libc::pthread_create(&mut thread, std::ptr::null(), run, null_mut()) == 0;
        if is_started {
            libc::pthread_detach(thread);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, null_mut());
        is_started
    }
}

/// Gives this thread a name in `/proc`.
pub(super) fn set_name(name: &CStr) {
    // SAFETY: the kernel reads at most 16 bytes of a C string.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}
