//! x86-64.

/// The name of the architecture.
pub const NAME: &str = "x86-64";
/// Its number in ELF files (`EM_X86_64`).
pub const ELF_MACHINE: u16 = 62;

/// The time-stamp counter.
#[inline]
pub(crate) fn counter() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC, and Linux forbids it only on request (`PR_SET_TSC`).
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Whether the counter has a constant rate, on all processors of the machine.
pub(crate) fn counter_is_invariant() -> bool {
    // CPUID leaf 0x8000_0007, EDX bit 8: invariant TSC (Intel SDM vol. 3B 18.17.1, AMD APM vol. 3 E.4.6).
    use core::arch::x86_64::__cpuid;
    __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx & (1 << 8) != 0
}

/// Prefetches memory for writing: a hint that changes nothing. Processors without it execute it as a no-op.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) fn prefetch_for_write<T>(memory: &T) {
    // SAFETY: a prefetch changes no memory.
    unsafe { core::arch::asm!("prefetchw [{}]", in(reg) memory, options(nostack, preserves_flags, readonly)) };
}
