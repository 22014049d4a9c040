//! Facts about the processor architecture: instructions, registers, calling conventions, relocations. They are in one
//! module for each architecture, with the same names, and nowhere else.

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod types;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

pub(crate) use types::StackRegisters;

/// Addresses that a program's memory can have. The first pages are never mapped.
pub const USER_ADDRESSES: std::ops::Range<usize> = 1 << 12..1 << USER_ADDRESS_BITS;

/// The same number, in a form that hides the equality from the compiler. It uses the later one of two equal numbers,
/// and then loads at this address would have to wait for it.
#[inline(always)]
pub(crate) fn opaque(mut number: usize) -> usize {
    // SAFETY: the assembly contains no instruction.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) number, options(nomem, nostack, preserves_flags)) };
    number
}
