//! x86-64: the System V psABI of Linux.

use std::ffi::{c_int, c_long, c_void};

/// The signal frame that the kernel puts on the stack has at least this many bytes: the red zone (128), the registers
/// and the floating-point state (512).
pub(crate) const LEAST_SIGNAL_FRAME_BYTES: usize = 1024;

/// The stack pointer.
#[inline(always)]
pub(crate) fn stack_pointer() -> usize {
    let address: usize;
    // SAFETY: reads one register.
    unsafe { std::arch::asm!("mov {}, rsp", out(reg) address, options(nomem, nostack, preserves_flags)) };
    address
}

/// The address of the calling thread's `memtrace_thread`.
#[inline(always)]
pub(crate) fn thread_block<T>() -> *const T {
    let address: *const T;
    // SAFETY: the first word of the thread control block is its own address (x86-64 TLS ABI). `memtrace_thread` is at a
    // constant distance from it, which the loader puts into the GOT entry.
    unsafe {
        std::arch::asm!(
            "mov {0}, qword ptr fs:[0]",
            "add {0}, qword ptr [rip + memtrace_thread@GOTTPOFF]",
            out(reg) address,
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
    // SAFETY: the kernel changes the result and these two registers, and what `name` points at.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") libc::SYS_prctl => result,
            in("rdi") c_long::from(operation),
            in("rsi") name,
            lateout("rcx") _,
            lateout("r11") _,
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
            "mov r11, qword ptr [rip + memtrace_thread@GOTTPOFF]",
            "mov rax, qword ptr [rsp]",
            "mov qword ptr fs:[r11 + {caller}], rax",
            "jmp {body}",
            caller = const $offset,
            body = sym $body,
        )
    };
}
pub(crate) use note_caller_and_jump;

/// The body of a naked function that is another one.
macro_rules! jump_to {
    ($function:path) => {
        std::arch::naked_asm!("jmp {function}", function = sym $function)
    };
}
pub(crate) use jump_to;

/// The body of the naked function `dlsym`: returns what `$replacement` returns for its two arguments. If that is null,
/// it jumps to the function in the word `$original`, if there is one, with registers and stack unchanged.
macro_rules! replace_or_jump_2 {
    ($replacement:path, $original:path) => {
        std::arch::naked_asm!(
            "push rdi",
            "push rsi",
            "sub rsp, 8",
            "call {replacement}",
            "add rsp, 8",
            "pop rsi",
            "pop rdi",
            "test rax, rax",
            "jne 2f",
            "mov rax, qword ptr [rip + {original}]",
            "test rax, rax",
            "je 2f",
            "jmp rax",
            "2:",
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
            "push rdi",
            "push rsi",
            "push rdx",
            "mov rcx, qword ptr [rsp + 24]",
            "call {replacement}",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "test rax, rax",
            "jne 2f",
            "mov rax, qword ptr [rip + {original}]",
            "test rax, rax",
            "je 2f",
            "jmp rax",
            "2:",
            "ret",
            replacement = sym $replacement,
            original = sym $original,
        )
    };
}
pub(crate) use replace_or_jump_3;

/// The body of a naked function of C++ that constructs its result in memory, at an address that the caller passes
/// beside the arguments. `$body` gets that address first and returns it.
macro_rules! construct_result {
    ($body:path) => {
        std::arch::naked_asm!("jmp {body}", body = sym $body)
    };
}
pub(crate) use construct_result;

/// Jumps to the address in the word `$slot`.
macro_rules! jump_through {
    ($slot:literal) => {
        concat!("jmp qword ptr [rip + ", $slot, "]")
    };
}
pub(crate) use jump_through;

/// The part of a resolving stub that calls `{resolve}` with the name at `4f` and the word at `3f`, and continues with
/// its result.
macro_rules! call_resolver {
    () => {
        // The argument registers. `al` is the number of vector registers of a variadic call. The seven words and the
        // return address keep the stack aligned to 16 bytes for the call.
        "push rdi
        .cfi_adjust_cfa_offset 8
        push rsi
        .cfi_adjust_cfa_offset 8
        push rdx
        .cfi_adjust_cfa_offset 8
        push rcx
        .cfi_adjust_cfa_offset 8
        push r8
        .cfi_adjust_cfa_offset 8
        push r9
        .cfi_adjust_cfa_offset 8
        push rax
        .cfi_adjust_cfa_offset 8
        lea rdi, [rip + 4f]
        lea rsi, [rip + 3f]
        call {resolve}
        mov r11, rax
        pop rax
        .cfi_adjust_cfa_offset -8
        pop r9
        .cfi_adjust_cfa_offset -8
        pop r8
        .cfi_adjust_cfa_offset -8
        pop rcx
        .cfi_adjust_cfa_offset -8
        pop rdx
        .cfi_adjust_cfa_offset -8
        pop rsi
        .cfi_adjust_cfa_offset -8
        pop rdi
        .cfi_adjust_cfa_offset -8
        jmp r11"
    };
}
pub(crate) use call_resolver;

/// A simple `memcpy`.
macro_rules! memcpy_code {
    () => {
        "mov rax, rdi
        mov rcx, rdx
        rep movsb
        ret"
    };
}
pub(crate) use memcpy_code;

/// A simple `memmove`. Copies forward unless the destination begins inside the source.
macro_rules! memmove_code {
    () => {
        "mov rax, rdi
        mov rcx, rdx
        mov r8, rdi
        sub r8, rsi
        cmp r8, rdx
        jb 5f
        rep movsb
        ret
        5:
        lea rdi, [rdi + rdx - 1]
        lea rsi, [rsi + rdx - 1]
        std
        rep movsb
        cld
        ret"
    };
}
pub(crate) use memmove_code;

/// A simple `memset`.
macro_rules! memset_code {
    () => {
        "mov r8, rdi
        mov eax, esi
        mov rcx, rdx
        rep stosb
        mov rax, r8
        ret"
    };
}
pub(crate) use memset_code;

/// A simple `memcmp`.
macro_rules! memcmp_code {
    () => {
        "xor ecx, ecx
        5:
        cmp rcx, rdx
        je 6f
        movzx eax, byte ptr [rdi + rcx]
        movzx r8d, byte ptr [rsi + rcx]
        inc rcx
        sub eax, r8d
        je 5b
        ret
        6:
        xor eax, eax
        ret"
    };
}
pub(crate) use memcmp_code;

/// A simple `strlen`.
macro_rules! strlen_code {
    () => {
        "xor eax, eax
        5:
        cmp byte ptr [rdi + rax], 0
        je 6f
        inc rax
        jmp 5b
        6:
        ret"
    };
}
pub(crate) use strlen_code;

/// The size of the largest pages of a kernel in bytes, huge pages not counted.
pub(crate) const LARGEST_PAGE: usize = 4096;

/// An empty type whose alignment is that of a page.
#[repr(align(4096))]
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
    // The address of the result is the first argument (Itanium C++ ABI).
    std::arch::naked_asm!(
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov rcx, r8",
        "mov r8, r9",
        "jmp rax",
    )
}
