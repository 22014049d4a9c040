//! Stubs of functions that are looked up when they are first called.

/// Defines a hidden function for each name. It jumps to the address in a word of its own, and leaves no frame. The word
/// first leads to `$resolve`, an `unsafe extern "C" fn(*const c_char, *const AtomicPtr<c_void>) -> *mut c_void`. It
/// gets the name and the word, stores an address in the word, and returns the function to continue with. `$section` is
/// the prefix of the stubs' sections.
macro_rules! resolving_stubs {
    ($section:literal, $resolve:ident, $($name:literal)*) => {
        $(std::arch::global_asm!(
            concat!(".pushsection .text.", $section, ".", $name, ",\"ax\",@progbits"),
            concat!(".globl ", $name),
            concat!(".hidden ", $name),
            concat!(".type ", $name, ",@function"),
            concat!($name, ":"),
            ".cfi_startproc",
            "jmp qword ptr [rip + 3f]",
            "2:",
            // The argument registers. `al` is the number of vector registers of a variadic call. None of these
            // functions takes a floating-point number, so vector registers need not be saved. The seven words and the
            // return address keep the stack aligned to 16 bytes for the call.
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
            "push r9",
            ".cfi_adjust_cfa_offset 8",
            "push rax",
            ".cfi_adjust_cfa_offset 8",
            "lea rdi, [rip + 4f]",
            "lea rsi, [rip + 3f]",
            "call {resolve}",
            "mov r11, rax",
            "pop rax",
            ".cfi_adjust_cfa_offset -8",
            "pop r9",
            ".cfi_adjust_cfa_offset -8",
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
            "jmp r11",
            ".cfi_endproc",
            concat!(".size ", $name, ", . - ", $name),
            ".popsection",
            concat!(".pushsection .data.", $section, ".", $name, ",\"aw\",@progbits"),
            ".p2align 3",
            "3:",
            ".quad 2b",
            ".popsection",
            concat!(".pushsection .rodata.", $section, ".", $name, ",\"a\",@progbits"),
            "4:",
            concat!(".asciz \"", $name, "\""),
            ".popsection",
            resolve = sym $resolve,
        );)*
    };
}

pub(super) use resolving_stubs;
