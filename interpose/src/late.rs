//! Functions of other libraries that are looked up when they are first called, so that the loader never looks for them.
//!
//! Two libraries would otherwise have to be there, or no traced process would start: libgcc_s, which exceptions that pass through
//! our frames need (who throws them has it, and a container without C++ may not), and glibc's own loader under its own name, which
//! the loader of another C library (musl) cannot find and dies for. With these stubs the C library alone is needed.
//!
//! A stub leaves no frame of its own: it jumps, with registers and stack as they came.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::real;

macro_rules! late {
    ($($name:literal)*) => {
        $(std::arch::global_asm!(
            concat!(".pushsection .text.memtrace_late.", $name, ",\"ax\",@progbits"),
            concat!(".globl ", $name),
            concat!(".hidden ", $name),
            concat!(".type ", $name, ",@function"),
            concat!($name, ":"),
            ".cfi_startproc",
            "mov rax, qword ptr [rip + 3f]",
            "test rax, rax",
            "je 2f",
            "jmp rax",
            "2:",
            // Five words on top of the return address: the stack is aligned for the call.
            "push rdi",
            ".cfi_adjust_cfa_offset 8",
            "push rsi",
            ".cfi_adjust_cfa_offset 8",
            "push rdx",
            ".cfi_adjust_cfa_offset 8",
            "push rcx",
            ".cfi_adjust_cfa_offset 8",
            "push r8",
            ".cfi_adjust_cfa_offset 8",
            "lea rdi, [rip + 4f]",
            "lea rsi, [rip + 3f]",
            "call {find}",
            "pop r8",
            ".cfi_adjust_cfa_offset -8",
            "pop rcx",
            ".cfi_adjust_cfa_offset -8",
            "pop rdx",
            ".cfi_adjust_cfa_offset -8",
            "pop rsi",
            ".cfi_adjust_cfa_offset -8",
            "pop rdi",
            ".cfi_adjust_cfa_offset -8",
            "jmp rax",
            ".cfi_endproc",
            concat!(".size ", $name, ", . - ", $name),
            ".popsection",
            concat!(".pushsection .bss.memtrace_late.", $name, ",\"aw\",@nobits"),
            ".p2align 3",
            "3:",
            ".zero 8",
            ".popsection",
            concat!(".pushsection .rodata.memtrace_late.", $name, ",\"a\",@progbits"),
            "4:",
            concat!(".asciz \"", $name, "\""),
            ".popsection",
            find = sym find,
        );)*
    };
}

late! {
    "__tls_get_addr"
    "_Unwind_Backtrace" "_Unwind_GetDataRelBase" "_Unwind_GetIP" "_Unwind_GetIPInfo" "_Unwind_GetLanguageSpecificData"
    "_Unwind_GetRegionStart" "_Unwind_GetTextRelBase" "_Unwind_RaiseException" "_Unwind_Resume" "_Unwind_SetGR" "_Unwind_SetIP"
}

/// The function behind a stub, remembered in `slot`. May not use thread-local storage of Rust's: that is behind a stub itself.
unsafe extern "C" fn find(name: *const c_char, slot: *const AtomicPtr<c_void>) -> *mut c_void {
    // SAFETY: the stub's own string and its own word, which begins as null.
    let (name, slot) = unsafe { (CStr::from_ptr(name), &*slot) };
    let mut found = real::lookup(libc::RTLD_DEFAULT, name);
    if found.is_null() {
        // Loaded where the names of everybody do not lead, as a C++ extension of a C program is; or not at all.
        let unwinder = real::load(c"libgcc_s.so.1");
        found = if unwinder.is_null() { unwinder } else { real::lookup(unwinder, name) };
    }
    if found.is_null() {
        return missing as *mut c_void;
    }
    slot.store(found, Ordering::Relaxed);
    found
}

/// What is answered without an unwinder: `_URC_END_OF_STACK`. Nobody throws then.
extern "C" fn missing() -> c_int {
    5
}
