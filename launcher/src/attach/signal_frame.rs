//! A call that a thread of another process makes in passing, as if a signal had interrupted it.
//!
//! The kernel lets a thread run a signal handler by two things: it writes the registers of the thread to its stack, and
//! sets them so that the handler returns to an `rt_sigreturn` system call, which restores them. [`SignalFrame`] is the
//! same, made by the tracer, with a function of the process in the place of the handler. So nothing is executed that is
//! not there already, no system call is made that the thread would not make for a signal, and one change of the
//! registers begins it all: whatever happens to the tracer before and after, the thread goes on with the program.
//!
//! The thread executes `rt_sigreturn` twice. The first time begins the call, with all signals blocked that programs may
//! block: a handler that leaves by `siglongjmp` would leave the call unfinished, with the locks of the loader. The
//! second time restores everything: general registers, flags, vector registers and the signal mask.

use super::arch::{self, Call, Interrupted, Prepared, Registers};

/// Signals that are not blocked meanwhile: those of errors, for which the kernel ends a process that blocks them, and
/// the two of the C library, for which `setuid` in another thread waits with the lock that `pthread_create` takes.
const NOT_BLOCKED: [i32; 8] =
    [libc::SIGILL, libc::SIGTRAP, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV, libc::SIGSYS, 32, 33];

/// A signal frame with which an interrupted thread calls a function and goes on.
pub(super) struct SignalFrame(Prepared);

impl SignalFrame {
    /// The frame for a thread that is between two instructions. `return_from_signal` is where the process has
    /// [`arch::RETURN_FROM_SIGNAL`].
    ///
    /// `None` if the thread's registers are not understood.
    pub(super) fn new(thread: &Interrupted, call: &Call<'_>, return_from_signal: u64) -> Option<SignalFrame> {
        let unblocked = NOT_BLOCKED.iter().fold(0, |set, signal| set | 1 << (signal - 1));
        arch::prepare(thread, call, return_from_signal, unblocked).map(SignalFrame)
    }

    /// Where [`Self::bytes`] belong on the thread's stack.
    pub(super) fn address(&self) -> u64 {
        self.0.address
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }

    /// The registers to set then.
    pub(super) fn registers(&self) -> Registers {
        self.0.registers
    }

    /// The part of the frame that stays as it is until the program goes on: its address and its bytes.
    pub(super) fn unchanged_part(&self) -> (u64, &[u8]) {
        let at = self.0.unchanged_from;
        (self.0.address + at as u64, self.0.bytes.get(at..).unwrap_or_default())
    }
}
