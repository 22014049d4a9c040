//! Facts about the processor architecture: instructions, registers and calling conventions. They are in one module for
//! each architecture, with the same names, and nowhere else. Both have the directives of the assembler in this file.

#![cfg_attr(test, allow(unused_macros, unused_imports, reason = "tests call the C library through the loader"))]

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

/// Defines the hidden symbol `$name`: a word with the address of `$value`.
macro_rules! pointer_symbol {
    ($name:literal, $value:path) => {
        std::arch::global_asm!(
            concat!(".pushsection .data.rel.ro.", $name, ",\"aw\",@progbits"),
            ".p2align 3",
            concat!(".hidden ", $name),
            concat!(".globl ", $name),
            concat!(".type ", $name, ",@object"),
            concat!(".size ", $name, ",8"),
            concat!($name, ":"),
            ".quad {value}",
            ".popsection",
            value = sym $value,
        );
    };
}
pub(crate) use pointer_symbol;

/// Defines the hidden thread-local symbol `memtrace_thread` of `$size` zeroed bytes, aligned to 64.
macro_rules! thread_block_symbol {
    ($size:expr) => {
        std::arch::global_asm!(
            ".pushsection .tbss.memtrace_thread,\"awT\",@nobits",
            ".p2align 6",
            ".hidden memtrace_thread",
            ".globl memtrace_thread",
            ".type memtrace_thread,@object",
            ".size memtrace_thread,{size}",
            "memtrace_thread:",
            ".zero {size}",
            ".popsection",
            size = const $size,
        );
    };
}
pub(crate) use thread_block_symbol;

/// Defines the hidden function `$name`, which jumps to the address in the word `$slot`. The word begins with the
/// address of `$code`.
macro_rules! jump_through_slot {
    ($name:literal, $slot:literal, $code:expr) => {
        std::arch::global_asm!(
            concat!(".pushsection .text.memtrace_c.", $name, ",\"ax\",@progbits"),
            ".p2align 2",
            concat!(".globl ", $name),
            concat!(".hidden ", $name),
            concat!(".type ", $name, ",@function"),
            concat!($name, ":"),
            ".cfi_startproc",
            $crate::arch::jump_through!($slot),
            "2:",
            $code,
            ".cfi_endproc",
            concat!(".size ", $name, ", . - ", $name),
            ".popsection",
            concat!(".pushsection .data.memtrace_c.", $name, ",\"aw\",@progbits"),
            ".p2align 3",
            concat!(".globl ", $slot),
            concat!(".hidden ", $slot),
            concat!(".type ", $slot, ",@object"),
            concat!(".size ", $slot, ",8"),
            concat!($slot, ":"),
            ".quad 2b",
            ".popsection",
        );
    };
    ($name:literal, $slot:literal) => {
        std::arch::global_asm!(
            concat!(".pushsection .text.memtrace_c.", $name, ",\"ax\",@progbits"),
            ".p2align 2",
            concat!(".globl ", $name),
            concat!(".hidden ", $name),
            concat!(".type ", $name, ",@function"),
            concat!($name, ":"),
            ".cfi_startproc",
            $crate::arch::jump_through!($slot),
            ".cfi_endproc",
            concat!(".size ", $name, ", . - ", $name),
            ".popsection",
        );
    };
}
pub(crate) use jump_through_slot;

/// Defines a hidden function for each name. It jumps to the address in a word of its own, and leaves no frame. The word
/// first leads to `$resolve`, an `unsafe extern "C" fn(*const c_char, *const AtomicPtr<c_void>) -> *mut c_void`. It
/// gets the name and the word, stores an address in the word, and returns the function to continue with. `$section` is
/// the prefix of the stubs' sections. None of the functions takes a floating-point number.
macro_rules! resolving_stubs {
    ($section:literal, $resolve:ident, $($name:literal)*) => {
        $(std::arch::global_asm!(
            concat!(".pushsection .text.", $section, ".", $name, ",\"ax\",@progbits"),
            ".p2align 2",
            concat!(".globl ", $name),
            concat!(".hidden ", $name),
            concat!(".type ", $name, ",@function"),
            concat!($name, ":"),
            ".cfi_startproc",
            $crate::arch::jump_through!("3f"),
            "2:",
            $crate::arch::call_resolver!(),
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
pub(crate) use resolving_stubs;
