//! The machine code at the door: who called us must be read before anything else runs.
//!
//! An exported CUDA function is a stub that stores its return address in a thread-local word and jumps to the body with
//! all registers and the stack as they came. The word is of the initial-exec TLS model, which a preloaded library may use:
//! two instructions, no call.

use std::arch::{asm, global_asm};

global_asm!(
    ".pushsection .tbss.memtrace_caller,\"awT\",@nobits",
    ".p2align 3",
    ".hidden memtrace_caller",
    ".globl memtrace_caller",
    ".type memtrace_caller,@object",
    ".size memtrace_caller,8",
    "memtrace_caller:",
    ".zero 8",
    ".popsection",
);

/// The return address of the stub that this thread entered last.
#[inline]
pub(super) fn caller() -> usize {
    let address: usize;
    // SAFETY: reads this thread's own word.
    unsafe {
        asm!(
            "mov {0}, qword ptr [rip + memtrace_caller@GOTTPOFF]",
            "mov {0}, qword ptr fs:[{0}]",
            out(reg) address,
            options(nostack, readonly, preserves_flags),
        );
    }
    address
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
                "mov r11, qword ptr [rip + memtrace_caller@GOTTPOFF]",
                "mov rax, qword ptr [rsp]",
                "mov qword ptr fs:[r11], rax",
                "jmp {body}",
                body = sym $body,
            )
        }
    };
}
pub(super) use entry;
