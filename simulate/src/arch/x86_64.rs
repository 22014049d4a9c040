//! x86-64: the System V psABI of Linux.

/// The size of the largest pages of a kernel in bytes, huge pages not counted.
pub const LARGEST_PAGE: u64 = 4096;

/// How many arguments are in registers.
pub const ARGUMENT_REGISTERS: usize = 6;

/// The body of the naked function to which stubs jump: calls `$called` with the record (in `rax`), the address of the
/// argument registers and that of the arguments on the stack, and returns its result.
#[macro_export]
macro_rules! call_with_record {
    ($called:path) => {
        std::arch::naked_asm!(
            "sub rsp, 56",
            "mov [rsp], rdi",
            "mov [rsp + 8], rsi",
            "mov [rsp + 16], rdx",
            "mov [rsp + 24], rcx",
            "mov [rsp + 32], r8",
            "mov [rsp + 40], r9",
            "mov rdi, rax",
            "mov rsi, rsp",
            "lea rdx, [rsp + 64]",
            "call {called}",
            "add rsp, 56",
            "ret",
            called = sym $called,
        )
    };
}
