//! The thread-local state of hooks: small, plain data without a destructor.
//!
//! The block uses the initial-exec TLS model, which a preloaded library may use. Its address takes two instructions.
//! Rust's model for shared libraries (general dynamic) would call `__tls_get_addr` on every access, several times an
//! event.

use std::cell::Cell;

use memtrace_trace::ids::ContextId;

use super::process::Process;
use super::thread_state::ThreadState;
use crate::arch;

/// The state of one thread. A thread starts with all zeros, which is a valid value.
#[repr(C, align(64))]
pub(crate) struct ThreadLocal {
    /// The stack pointer at which the thread's [`Guard`](super::guard::Guard) was made. 0 if it has none.
    pub(crate) guard_frame: Cell<usize>,
    /// Whether the thread is using the common ring, because it has none of its own.
    pub(crate) uses_common_ring: Cell<bool>,
    /// Whether the last event is written and not yet published. An allocation waits for its rounded size, a free
    /// request for its completion.
    pub(crate) has_unpublished: Cell<bool>,
    /// The value of `errno` when the guard was made.
    pub(crate) errno: Cell<i32>,
    /// The address of this thread's `errno`. Null before the first guard.
    pub(crate) errno_address: Cell<*mut i32>,
    /// The process whose ring this thread writes to. After a fork it may still be the parent.
    pub(crate) process: Cell<*const Process>,
    /// The state of the claimed ring. Null if none is claimed.
    pub(crate) state: Cell<*const ThreadState>,
    /// The autograd node that is running (`torch::autograd`).
    pub(crate) context: Cell<ContextId>,
    /// The address of this thread's `c10::AutogradState`. Null before it may be read (`torch::grad_mode`).
    pub(crate) autograd_state: Cell<*const u8>,
    /// The nesting depth of `evaluate_function` calls.
    pub(crate) backward_depth: Cell<u32>,
    /// The return address of the stub that was entered last. `cuda::entry` writes it.
    pub(crate) caller: Cell<usize>,
    /// The nesting depth of hooked runtime calls.
    pub(crate) runtime_depth: Cell<u32>,
    /// The stack pointer at which the outermost of them was made.
    pub(crate) runtime_frame: Cell<usize>,
    /// Whether a driver call was recorded inside the current runtime call.
    pub(crate) has_nested_call: Cell<bool>,
    /// Whether PyTorch's caching allocator made the current runtime call.
    pub(crate) runtime_in_allocator: Cell<bool>,
    /// The memory that a hooked CUDA call last allocated for PyTorch's allocator on this thread.
    pub(crate) last_segment: Cell<LastSegment>,
    /// The stack pointer at which the thread took the lock of the run. 0 if it does not hold it.
    pub(crate) run_lock_frame: Cell<usize>,
}

/// An address and size in bytes, as CUDA returned them.
#[derive(Clone, Copy, Default)]
pub(crate) struct LastSegment {
    pub(crate) addr: u64,
    pub(crate) size: u64,
    /// The timestamp at which the call had returned, in units of [`memtrace_trace::clock`].
    pub(crate) since: u64,
}

const SIZE: usize = 128;
const _: () = assert!(size_of::<ThreadLocal>() == SIZE && align_of::<ThreadLocal>() == 64);

arch::thread_block_symbol!(SIZE);

impl ThreadLocal {
    /// The calling thread's block. The reference must not outlive the current call or reach another thread.
    #[inline(always)]
    pub(crate) fn current() -> &'static ThreadLocal {
        // SAFETY: the block is aligned, zeroed when the thread starts and alive while it runs. All fields are cells.
        unsafe { &*arch::thread_block() }
    }
}

/// Calls `visit` with the calling thread's block.
#[inline(always)]
pub(crate) fn with_thread_local<T>(visit: impl FnOnce(&ThreadLocal) -> T) -> T {
    visit(ThreadLocal::current())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_has_its_own_zeroed_block() {
        let here = ThreadLocal::current();
        assert!(std::ptr::eq(here, ThreadLocal::current()));
        here.runtime_depth.set(7);
        let other = std::thread::spawn(|| {
            let thread = ThreadLocal::current();
            (std::ptr::from_ref(thread).addr(), thread.runtime_depth.replace(9), thread.guard_frame.get())
        });
        let (address, depth, frame) = other.join().unwrap();
        assert_ne!(address, std::ptr::from_ref(here).addr());
        assert_eq!((depth, frame, here.runtime_depth.replace(0)), (0, 0, 7));
    }
}
