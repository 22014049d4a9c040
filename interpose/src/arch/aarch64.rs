//! AArch64: the AAPCS64 on Linux. `hint #34` is `bti c`, the mark of a destination of indirect calls; processors
//! without that feature execute it as a no-op. `x16` and `x17` are for code between caller and callee.

use std::ffi::{c_int, c_long, c_void};

/// The signal frame that the kernel puts on the stack has at least this many bytes: `struct rt_sigframe`, which
/// reserves 4096 bytes for vector registers (arch/arm64/kernel/signal.c).
pub(crate) const LEAST_SIGNAL_FRAME_BYTES: usize = 4560;

/// The stack pointer.
#[inline(always)]
pub(crate) fn stack_pointer() -> usize {
    let address: usize;
    // SAFETY: reads one register.
    unsafe { std::arch::asm!("mov {}, sp", out(reg) address, options(nomem, nostack, preserves_flags)) };
    address
}

/// The address of the calling thread's `memtrace_thread`.
#[inline(always)]
pub(crate) fn thread_block<T>() -> *const T {
    let address: *const T;
    // SAFETY: `memtrace_thread` is at a constant distance from the thread pointer, which the loader puts into the GOT
    // entry.
    unsafe {
        std::arch::asm!(
            "mrs {0}, tpidr_el0",
            "adrp {1}, :gottprel:memtrace_thread",
            "ldr {1}, [{1}, :gottprel_lo12:memtrace_thread]",
            "add {0}, {0}, {1}",
            out(reg) address,
            out(reg) _,
            options(pure, nomem, nostack),
        );
    }
    address
}

/// The system call prctl(2), without the C library.
///
/// # Safety
///
/// `name` has the 16 bytes that the operation reads or writes.
pub(crate) unsafe fn prctl(operation: c_int, name: *mut u8) -> c_long {
    let result: c_long;
    // SAFETY: the kernel changes the result, and what `name` points at.
    unsafe {
        std::arch::asm!(
            "svc #0",
            in("x8") libc::SYS_prctl,
            inlateout("x0") c_long::from(operation) => result,
            in("x1") name,
            options(nostack),
        );
    }
    result
}

/// The body of a naked function: stores the caller's address in the thread's block at `$offset` and jumps to `$body`,
/// with the stack and all argument registers unchanged. `$own` is a second, hidden name of the function.
macro_rules! note_caller_and_jump {
    ($own:expr, $offset:expr, $body:path) => {
        std::arch::naked_asm!(
            concat!(".globl ", $own),
            concat!(".hidden ", $own),
            concat!($own, ":"),
            "hint #34",
            "adrp x16, :gottprel:memtrace_thread",
            "ldr x16, [x16, :gottprel_lo12:memtrace_thread]",
            "mrs x17, tpidr_el0",
            "add x16, x16, x17",
            "str x30, [x16, #{caller}]",
            "b {body}",
            caller = const $offset,
            body = sym $body,
        )
    };
}
pub(crate) use note_caller_and_jump;

/// The body of a naked function that is another one.
macro_rules! jump_to {
    ($function:path) => {
        std::arch::naked_asm!("hint #34", "b {function}", function = sym $function)
    };
}
pub(crate) use jump_to;

/// The body of the naked function `dlsym`: returns what `$replacement` returns for its two arguments. If that is null,
/// it jumps to the function in the word `$original`, if there is one, with registers and stack unchanged.
macro_rules! replace_or_jump_2 {
    ($replacement:path, $original:path) => {
        std::arch::naked_asm!(
            "hint #34",
            "stp x29, x30, [sp, #-32]!",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "bl {replacement}",
            "mov x16, x0",
            "ldp x0, x1, [sp, #16]",
            "ldp x29, x30, [sp], #32",
            "cbnz x16, 2f",
            "adrp x16, {original}",
            "ldr x16, [x16, :lo12:{original}]",
            "cbz x16, 2f",
            "br x16",
            "2:",
            "mov x0, x16",
            "ret",
            replacement = sym $replacement,
            original = sym $original,
        )
    };
}
pub(crate) use replace_or_jump_2;

/// [`replace_or_jump_2`] for `dlvsym`, with three arguments. `$replacement` also gets the caller's address.
macro_rules! replace_or_jump_3 {
    ($replacement:path, $original:path) => {
        std::arch::naked_asm!(
            "hint #34",
            "stp x29, x30, [sp, #-48]!",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "str x2, [sp, #32]",
            "mov x3, x30",
            "bl {replacement}",
            "mov x16, x0",
            "ldp x0, x1, [sp, #16]",
            "ldr x2, [sp, #32]",
            "ldp x29, x30, [sp], #48",
            "cbnz x16, 2f",
            "adrp x16, {original}",
            "ldr x16, [x16, :lo12:{original}]",
            "cbz x16, 2f",
            "br x16",
            "2:",
            "mov x0, x16",
            "ret",
            replacement = sym $replacement,
            original = sym $original,
        )
    };
}
pub(crate) use replace_or_jump_3;

/// The body of a naked function of C++ with one argument that constructs its result in memory, at an address that the
/// caller passes beside the arguments: in `x8`. `$body` gets that address first.
macro_rules! construct_result {
    ($body:path) => {
        std::arch::naked_asm!("hint #34", "mov x1, x0", "mov x0, x8", "b {body}", body = sym $body)
    };
}
pub(crate) use construct_result;

/// Jumps to the address in the word `$slot`.
macro_rules! jump_through {
    ($slot:literal) => {
        concat!("hint #34\n adrp x16, ", $slot, "\n ldr x16, [x16, :lo12:", $slot, "]\n br x16")
    };
}
pub(crate) use jump_through;

/// The part of a resolving stub that calls `{resolve}` with the name at `4f` and the word at `3f`, and continues with
/// its result. It saves the argument registers.
macro_rules! call_resolver {
    () => {
        "hint #34
        stp x29, x30, [sp, #-96]!
        .cfi_def_cfa_offset 96
        .cfi_offset x29, -96
        .cfi_offset x30, -88
        stp x0, x1, [sp, #16]
        stp x2, x3, [sp, #32]
        stp x4, x5, [sp, #48]
        stp x6, x7, [sp, #64]
        str x8, [sp, #80]
        adrp x0, 4f
        add x0, x0, :lo12:4f
        adrp x1, 3f
        add x1, x1, :lo12:3f
        bl {resolve}
        mov x16, x0
        ldp x0, x1, [sp, #16]
        ldp x2, x3, [sp, #32]
        ldp x4, x5, [sp, #48]
        ldp x6, x7, [sp, #64]
        ldr x8, [sp, #80]
        ldp x29, x30, [sp], #96
        .cfi_def_cfa_offset 0
        .cfi_restore x29
        .cfi_restore x30
        br x16"
    };
}
pub(crate) use call_resolver;

/// A simple `memcpy`.
macro_rules! memcpy_code {
    () => {
        "hint #34
        mov x9, x0
        5:
        cbz x2, 6f
        ldrb w10, [x1], #1
        strb w10, [x9], #1
        sub x2, x2, #1
        b 5b
        6:
        ret"
    };
}
pub(crate) use memcpy_code;

/// A simple `memmove`. Copies forward unless the destination begins inside the source.
macro_rules! memmove_code {
    () => {
        "hint #34
        sub x9, x0, x1
        cmp x9, x2
        b.lo 7f
        mov x9, x0
        5:
        cbz x2, 6f
        ldrb w10, [x1], #1
        strb w10, [x9], #1
        sub x2, x2, #1
        b 5b
        6:
        ret
        7:
        cbz x2, 6b
        sub x2, x2, #1
        ldrb w10, [x1, x2]
        strb w10, [x0, x2]
        b 7b"
    };
}
pub(crate) use memmove_code;

/// A simple `memset`.
macro_rules! memset_code {
    () => {
        "hint #34
        mov x9, x0
        5:
        cbz x2, 6f
        strb w1, [x9], #1
        sub x2, x2, #1
        b 5b
        6:
        ret"
    };
}
pub(crate) use memset_code;

/// A simple `memcmp`.
macro_rules! memcmp_code {
    () => {
        "hint #34
        mov x9, x0
        mov w0, #0
        5:
        cbz x2, 6f
        ldrb w10, [x9], #1
        ldrb w11, [x1], #1
        sub x2, x2, #1
        subs w0, w10, w11
        b.eq 5b
        6:
        ret"
    };
}
pub(crate) use memcmp_code;

/// A simple `strlen`.
macro_rules! strlen_code {
    () => {
        "hint #34
        mov x9, x0
        mov x0, #0
        5:
        ldrb w10, [x9, x0]
        cbz w10, 6f
        add x0, x0, #1
        b 5b
        6:
        ret"
    };
}
pub(crate) use strlen_code;

/// The size of the largest pages of a kernel in bytes, huge pages not counted.
pub(crate) const LARGEST_PAGE: usize = 65536;

/// An empty type whose alignment is that of a page.
#[repr(align(65536))]
pub(crate) struct PageAligned;

/// Calls a function of C++ whose result is not trivial: it is constructed at `result`. Functions with fewer arguments
/// ignore the registers of the others.
///
/// # Safety
///
/// `function` is such a function with these arguments, and `result` has the size of its result.
#[unsafe(naked)]
pub(crate) unsafe extern "C-unwind" fn call_constructing(
    _function: *const c_void,
    _result: *mut c_void,
    _first: u64,
    _second: u64,
    _third: u64,
    _fourth: u64,
) {
    std::arch::naked_asm!(
        "hint #34",
        "mov x16, x0",
        "mov x8, x1",
        "mov x0, x2",
        "mov x1, x3",
        "mov x2, x4",
        "mov x3, x5",
        "br x16",
    )
}
