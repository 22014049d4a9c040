//! AArch64: the AAPCS64 and the ELF and DWARF supplements of Arm, on Linux.

use gimli::{AArch64, Register, Vendor};

use super::types::{SavedBySignal, StackRegisters};

/// The bits of a program's addresses. Linux gives out addresses of more than 48 bits only to those who ask for them
/// (Documentation/arch/arm64/memory.rst).
pub const USER_ADDRESS_BITS: u32 = 52;
/// How many of the lowest bits of a code address are 0.
pub(crate) const CODE_ALIGNMENT_BITS: u32 = 2;
/// Whether all threads see stores in the order in which another thread makes them, and make loads in program order.
pub const KEEPS_ORDER_OF_STORES: bool = false;

/// `R_AARCH64_GLOB_DAT`: a relocation of a word for the address of a symbol.
pub const R_GLOB_DAT: u32 = 1025;
/// `R_AARCH64_JUMP_SLOT`: the same, for a function that is called.
pub const R_JUMP_SLOT: u32 = 1026;

/// DWARF's registers of the stack pointer, the frame pointer, and the return address.
pub(crate) const SP: Register = AArch64::SP;
pub(crate) const BP: Register = AArch64::X29;
pub(crate) const RA: Register = AArch64::X30;
/// Whose extensions of unwinding information are used: `DW_CFA_AARCH64_negate_ra_state`.
pub(crate) const VENDOR: Vendor = Vendor::AArch64;
/// How far the canonical frame address is above the stack pointer when a function starts, in bytes.
pub(crate) const CFA_AT_START: i64 = 0;
/// Whether a call stores the return address in a register, and not on the stack.
pub(crate) const HAS_LINK_REGISTER: bool = true;
/// Whether a frame pointer also gives the caller's stack pointer. Here local variables can be above the frame record.
pub(crate) const FRAME_POINTER_GIVES_SP: bool = false;
/// Where a signal frame has the registers: in `struct rt_sigframe` (arch/arm64/kernel/signal.c), 128 bytes of
/// `siginfo_t` are before `ucontext_t`, whose `mcontext_t` begins at 176 with `fault_address` and `x0` to `x30`. The
/// vDSO and the C libraries describe it with no unwinding information, or only with the frame record that the kernel
/// adds, which has another address than that of the interrupted instruction.
pub(crate) const SAVED_BY_SIGNAL: Option<SavedBySignal> = Some(SavedBySignal {
    bp: REGISTERS + 29 * 8,
    link: REGISTERS + 30 * 8,
    sp: REGISTERS + 31 * 8,
    ip: REGISTERS + 32 * 8,
});
const REGISTERS: i32 = 128 + 176 + 8;

/// Whether the value of this register in an expression is the address of the instruction. DWARF has no such register
/// here.
pub(crate) fn is_instruction_pointer(_register: Register) -> bool {
    false
}

/// The registers of the function into which this one is inlined.
#[inline(always)]
pub(crate) fn registers() -> StackRegisters {
    let (ip, sp, bp);
    // SAFETY: only reads three registers.
    unsafe {
        std::arch::asm!(
            "adr {ip}, .",
            "mov {sp}, sp",
            "mov {bp}, x29",
            ip = out(reg) ip,
            sp = out(reg) sp,
            bp = out(reg) bp,
            options(nomem, nostack, preserves_flags),
        );
    }
    StackRegisters { ip, sp, bp }
}

/// A return address as it is stored, without its signature (pointer authentication). Processors without that feature
/// execute the instruction as a no-op, and others know how many bits their addresses have.
#[inline(always)]
pub(crate) fn without_signature(address: usize) -> usize {
    let mut stripped = address;
    // SAFETY: changes one register. `hint #7` is XPACLRI.
    unsafe {
        std::arch::asm!("hint #7", inout("x30") stripped, options(pure, nomem, nostack, preserves_flags));
    }
    stripped
}

/// Whether `code` begins with the instructions that return from a signal handler: `mov x8, #__NR_rt_sigreturn`,
/// `svc #0`. Debuggers and libgcc recognize them, too (libgcc/config/aarch64/linux-unwind.h).
pub(crate) fn is_signal_return(code: &[u8]) -> bool {
    code.starts_with(&[0x68, 0x11, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4])
}

/// Whether the last instruction of `code` is a call.
pub(crate) fn ends_with_call(code: &[u8]) -> bool {
    let Some(word) = code.last_chunk().map(|word| u32::from_le_bytes(*word)) else { return false };
    // `bl`, `blr`, and `blraa`, `blrab`, `blraaz`, `blrabz`, which authenticate the address.
    word >> 26 == 0b10_0101 || word & 0xffff_fc1f == 0xd63f_0000 || word & 0xfeff_f800 == 0xd63f_0800
}

/// Calls `visit` with the destination of each direct jump in `code`, which is at the address `start`. Data between
/// instructions may look the same.
pub(crate) fn for_each_jump(code: &[u8], start: usize, mut visit: impl FnMut(usize)) {
    for (index, word) in code.as_chunks::<4>().0.iter().enumerate() {
        let word = u32::from_le_bytes(*word);
        // The signed immediate of this many bits that ends below bit `top`, in instructions.
        let immediate = |top: u32, bits: u32| isize::try_from((word << (32 - top)).cast_signed() >> (32 - bits));
        let distance = match word {
            // `b`.
            _ if word >> 26 == 0b00_0101 => immediate(26, 26),
            // `b.cond`, and `bc.cond`; `cbz` and `cbnz`.
            _ if word >> 24 == 0b0101_0100 || word >> 25 & 0b11_1111 == 0b01_1010 => immediate(24, 19),
            // `tbz` and `tbnz`.
            _ if word >> 25 & 0b11_1111 == 0b01_1011 => immediate(19, 14),
            _ => continue,
        };
        visit((start + index * 4).wrapping_add_signed(distance.unwrap_or(0) * 4));
    }
}

/// Calls the resolver of an indirect function (`STT_GNU_IFUNC`). It gets what the kernel says about the processor
/// (sys/ifunc.h).
///
/// # Safety
///
/// `resolver` is the address of such a function, in an object that is relocated.
pub(crate) unsafe fn resolve_indirect(resolver: usize) -> usize {
    /// `_IFUNC_ARG_HWCAP`: there is a second argument.
    const HAS_SECOND: u64 = 1 << 62;
    /// `__ifunc_arg_t`. Later versions have more fields at the end, and read those that the size includes.
    #[repr(C)]
    struct Argument {
        size: u64,
        hwcap: u64,
        hwcap2: u64,
    }
    // SAFETY: `getauxval` takes any number.
    let (hwcap, hwcap2) = unsafe { (libc::getauxval(libc::AT_HWCAP), libc::getauxval(libc::AT_HWCAP2)) };
    let argument = Argument { size: size_of::<Argument>() as u64, hwcap, hwcap2 };
    // SAFETY: the caller guarantees a function of this type, or one that takes fewer arguments.
    unsafe {
        std::mem::transmute::<*mut (), extern "C" fn(u64, &Argument) -> usize>(std::ptr::with_exposed_provenance_mut(
            resolver,
        ))(hwcap | HAS_SECOND, &argument)
    }
}

/// The address of the loader's `_r_debug`, 0 if it exports none. The loader has resolved this weak reference before any
/// code of this object ran.
pub(crate) fn r_debug_symbol() -> usize {
    let address: usize;
    // SAFETY: reads one word of the global offset table.
    unsafe {
        std::arch::asm!(
            ".weak _r_debug",
            "adrp {0}, :got:_r_debug",
            "ldr {0}, [{0}, :got_lo12:_r_debug]",
            out(reg) address,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    address
}

/// The address of the dynamic section of the object that contains this code.
pub(crate) fn dynamic_section() -> usize {
    let address: usize;
    // SAFETY: computes the address of a symbol that the linker defines in every dynamically linked object.
    unsafe {
        std::arch::asm!(
            ".hidden _DYNAMIC",
            "adrp {0}, _DYNAMIC",
            "add {0}, {0}, :lo12:_DYNAMIC",
            out(reg) address,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn call_instructions_are_recognized() {
        // bl; blr x3; blraa x8, x9; blraaz x16; blrabz x1.
        for call in [0x9400_0010, 0xd63f_0060, 0xd73f_0909, 0xd63f_0a1f, 0xd63f_0c3f] {
            assert!(ends_with_call(&code(&[0, call])), "{call:08x}");
        }
        // nop; b; br x3; ret.
        for other in [0xd503_201f, 0x1400_0010, 0xd61f_0060, 0xd65f_03c0] {
            assert!(!ends_with_call(&code(&[0x9400_0010, other])), "{other:08x}");
        }
        assert!(!ends_with_call(&[0x94, 0, 0]));
    }

    #[test]
    fn destinations_of_jumps_are_found() {
        let mut found = Vec::new();
        // b +0x40; b.eq -8; cbnz x1, +0x20; tbz w2, #3, -4; nop.
        let code = code(&[0x1400_0010, 0x54ff_ffc0, 0xb500_0101, 0x361f_ffe2, 0xd503_201f]);
        for_each_jump(&code, 0x1000, |target| found.push(target));
        assert_eq!(found, [0x1040, 0x0ffc, 0x1028, 0x1008]);
    }

    #[test]
    fn a_signature_is_stripped() {
        let address = ends_with_call as *const () as usize;
        let mut signed = address;
        // SAFETY: signs a register with the stack pointer (PACIASP), or leaves it as it is.
        unsafe { std::arch::asm!("hint #25", inout("x30") signed, options(nomem, nostack, preserves_flags)) };
        assert_eq!((without_signature(signed), without_signature(address)), (address, address));
    }
}
