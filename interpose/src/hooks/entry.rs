//! The machine code at the door: who called us must be read before anything else runs.
//!
//! An exported CUDA function is a stub that stores its return address in a word of the thread's own ([`crate::thread`]) and jumps to
//! the body with all registers and the stack as they came.

use crate::thread::{Thread, thread};

/// Where the word is in a thread's block.
pub(super) const CALLER: usize = std::mem::offset_of!(Thread, caller);

/// The return address of the stub that this thread entered last.
#[inline]
pub(super) fn caller() -> usize {
    thread(|t| t.caller.get())
}

/// Defines an exported stub `$name` that jumps to `$body`.
macro_rules! entry {
    ($name:ident => $body:path) => {
        /// The exported stub.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        #[allow(non_snake_case)]
        pub(in crate::hooks) unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "mov r11, qword ptr [rip + memtrace_thread@GOTTPOFF]",
                "mov rax, qword ptr [rsp]",
                "mov qword ptr fs:[r11 + {caller}], rax",
                "jmp {body}",
                caller = const $crate::hooks::entry::CALLER,
                body = sym $body,
            )
        }
    };
}
pub(super) use entry;
