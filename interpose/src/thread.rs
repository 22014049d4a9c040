//! What a thread has in thread-local storage: small, plain, without a destructor.
//!
//! The block is of the initial-exec TLS model, which a preloaded library may use: its address is two instructions away. The model
//! that Rust gives a shared library (general dynamic) is a call of `__tls_get_addr` at every use, several times an event.

use std::arch::{asm, global_asm};
use std::cell::Cell;

use memtrace_trace::ids::ContextId;

use crate::local::Local;
use crate::process::Process;

/// See the module. All zeroes, which is how a thread begins, is a valid value.
#[repr(C, align(64))]
pub(crate) struct Thread {
    /// Whether a hook's own work is under way; see [`crate::guard`].
    pub(crate) busy: Cell<bool>,
    /// Whether the common ring is being used, for want of one of our own.
    pub(crate) common: Cell<bool>,
    /// Whether the last event was written and not published: an allocation waits for its rounded size, a free for its completion.
    pub(crate) holds: Cell<bool>,
    /// `errno` as it was when the work began.
    pub(crate) errno: Cell<i32>,
    /// Where this thread's `errno` is; null until first asked for.
    pub(crate) errno_at: Cell<*mut i32>,
    /// Whose ring this thread writes to: another process's (before a fork) is none of ours.
    pub(crate) process: Cell<*const Process>,
    /// What belongs to the claimed ring; null: none is claimed.
    pub(crate) local: Cell<*const Local>,
    /// The autograd node being run; see `hooks::torch::autograd`.
    pub(crate) context: Cell<ContextId>,
    /// This thread's `c10::AutogradState`, once it may be read; see `hooks::torch::grad_mode`.
    pub(crate) autograd_state: Cell<*const u8>,
    /// Depth of `evaluate_function` calls.
    pub(crate) backward_depth: Cell<u32>,
    /// The return address of the stub that was entered last; written by `hooks::entry`.
    pub(crate) caller: Cell<usize>,
    /// Depth of hooked runtime calls, and whether a driver call was recorded inside.
    pub(crate) runtime_depth: Cell<u32>,
    pub(crate) nested_seen: Cell<bool>,
    /// Whether the runtime call under way was made by PyTorch's caching allocator.
    pub(crate) runtime_in_allocator: Cell<bool>,
    /// What a hooked CUDA call last gave to PyTorch's allocator on this thread.
    pub(crate) last_segment: Cell<LastSegment>,
}

/// See [`Thread::last_segment`].
#[derive(Clone, Copy, Default)]
pub(crate) struct LastSegment {
    pub(crate) addr: u64,
    pub(crate) size: u64,
    /// When the call had returned, in [`memtrace_trace::clock`] ticks.
    pub(crate) since: u64,
}

const SIZE: usize = 128;
const _: () = assert!(size_of::<Thread>() == SIZE && align_of::<Thread>() == 64);

global_asm!(
    ".pushsection .tbss.memtrace_thread,\"awT\",@nobits",
    ".p2align 6",
    ".hidden memtrace_thread",
    ".globl memtrace_thread",
    ".type memtrace_thread,@object",
    ".size memtrace_thread,{size}",
    "memtrace_thread:",
    ".zero {size}",
    ".popsection",
    size = const SIZE,
);

impl Thread {
    /// The calling thread's. Not to be kept beyond the call that asked, nor handed to another thread.
    #[inline(always)]
    pub(crate) fn here() -> &'static Thread {
        let address: *const Thread;
        // SAFETY: the first word of the thread control block is its own address (x86-64 TLS ABI), and the block above lies at a
        // fixed distance from it.
        unsafe {
            asm!(
                "mov {0}, qword ptr fs:[0]",
                "add {0}, qword ptr [rip + memtrace_thread@GOTTPOFF]",
                out(reg) address,
                options(pure, nomem, nostack),
            );
        }
        // SAFETY: aligned, zeroed when the thread began, alive as long as the thread runs; all fields are cells.
        unsafe { &*address }
    }
}

/// Lets the calling thread's storage be looked at.
#[inline(always)]
pub(crate) fn thread<T>(visit: impl FnOnce(&Thread) -> T) -> T {
    visit(Thread::here())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_begins_with_zeroes_and_has_its_own() {
        let here = Thread::here();
        assert!(std::ptr::eq(here, Thread::here()));
        here.runtime_depth.set(7);
        let other = std::thread::spawn(|| {
            let there = Thread::here();
            (std::ptr::from_ref(there).addr(), there.runtime_depth.replace(9), there.busy.get())
        });
        let (address, depth, busy) = other.join().unwrap();
        assert_ne!(address, std::ptr::from_ref(here).addr());
        assert_eq!((depth, busy, here.runtime_depth.replace(0)), (0, false, 7));
    }
}
