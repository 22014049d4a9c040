//! AArch64.

/// The name of the architecture.
pub const NAME: &str = "AArch64";
/// Its number in ELF files (`EM_AARCH64`).
pub const ELF_MACHINE: u16 = 183;

/// The virtual counter of the generic timer. The barrier is what Linux's own clock has: without it the processor may
/// read the counter before earlier instructions.
#[inline]
pub(crate) fn counter() -> u64 {
    let ticks: u64;
    // SAFETY: reads a register, which Linux permits every program to read.
    unsafe { core::arch::asm!("isb", "mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags)) };
    ticks
}

/// Whether the counter has a constant rate, on all processors of the machine: so the architecture defines it (Arm ARM
/// D12.1).
pub(crate) fn counter_is_invariant() -> bool {
    true
}

/// Prefetches memory for writing: a hint that changes nothing.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) fn prefetch_for_write<T>(memory: &T) {
    // SAFETY: a prefetch changes no memory.
    unsafe { core::arch::asm!("prfm pstl1keep, [{}]", in(reg) memory, options(nostack, preserves_flags, readonly)) };
}
