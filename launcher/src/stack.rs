//! Runs the launcher on a stack of sufficient size.
//!
//! `ulimit -s` limits the stack of the first thread, and nothing else: threads that Rust starts have stacks of their
//! own size. Parsing the command line alone takes more than 16 KiB. So with a small limit, everything runs in a second
//! thread. The first one only waits for it. The command inherits the limit unchanged.

use std::mem::MaybeUninit;
use std::panic::resume_unwind;
use std::ptr::null_mut;
use std::thread::Builder;

use rustix::process::{Resource, getrlimit};

/// A stack of this size is large enough, in bytes.
const ENOUGH: u64 = 2 << 20;
/// The stack of the second thread, in bytes: Linux's usual limit.
const STACK_SIZE: usize = 8 << 20;

/// Runs `work` on a stack of sufficient size and returns its result.
///
/// With a second thread, all signals go to that thread and the threads that it starts, as if the first one did not
/// exist. Death signals of child processes are sent when the thread ends that started them, and that is when `work`
/// ends.
pub(crate) fn run_with_enough(work: fn() -> u8) -> u8 {
    if getrlimit(Resource::Stack).current.is_none_or(|limit| limit >= ENOUGH) {
        return work();
    }
    let mask = block_all_signals();
    let with_mask = move || {
        set_signal_mask(&mask);
        work()
    };
    match Builder::new().stack_size(STACK_SIZE).spawn(with_mask) {
        Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
        Err(_) => {
            // No thread or no memory: the small stack may suffice.
            set_signal_mask(&mask);
            work()
        }
    }
}

/// Blocks every signal in this thread, and returns the mask before.
fn block_all_signals() -> libc::sigset_t {
    let mut all = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: both sets are valid for writes. They are zero-initialized, so `assume_init` is sound even if a call
    // fails.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

fn set_signal_mask(mask: &libc::sigset_t) {
    // SAFETY: `mask` is an initialized signal set. The null pointer asks for no old mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, null_mut()) };
}
