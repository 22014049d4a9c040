//! AArch64: the AAPCS64 on Linux.

/// The size of the largest pages of a kernel in bytes, huge pages not counted.
pub const LARGEST_PAGE: u64 = 65536;

/// How many arguments are in registers.
pub const ARGUMENT_REGISTERS: usize = 8;

/// The body of the naked function to which stubs jump: calls `$called` with the record (in `x16`), the address of the
/// argument registers and that of the arguments on the stack, and returns its result.
#[macro_export]
macro_rules! call_with_record {
    ($called:path) => {
        std::arch::naked_asm!(
            "hint #34",
            "stp x29, x30, [sp, #-80]!",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "stp x2, x3, [sp, #32]",
            "stp x4, x5, [sp, #48]",
            "stp x6, x7, [sp, #64]",
            "mov x0, x16",
            "add x1, sp, #16",
            "add x2, sp, #80",
            "bl {called}",
            "ldp x29, x30, [sp], #80",
            "ret",
            called = sym $called,
        )
    };
}
