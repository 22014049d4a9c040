//! x86-64: the System V psABI of Linux.

use gimli::{Register, Vendor, X86_64};

use super::types::{SavedBySignal, StackRegisters};

/// The bits of a program's addresses.
pub const USER_ADDRESS_BITS: u32 = 47;
/// How many of the lowest bits of a code address are 0.
pub(crate) const CODE_ALIGNMENT_BITS: u32 = 0;
/// Whether all threads see stores in the order in which another thread makes them, and make loads in program order.
pub const KEEPS_ORDER_OF_STORES: bool = true;

/// `R_X86_64_GLOB_DAT`: a relocation of a word for the address of a symbol.
pub const R_GLOB_DAT: u32 = 6;
/// `R_X86_64_JUMP_SLOT`: the same, for a function that is called.
pub const R_JUMP_SLOT: u32 = 7;

/// DWARF's registers of the stack pointer, the frame pointer, and the return address.
pub(crate) const SP: Register = X86_64::RSP;
pub(crate) const BP: Register = X86_64::RBP;
pub(crate) const RA: Register = X86_64::RA;
/// Whose extensions of unwinding information are used.
pub(crate) const VENDOR: Vendor = Vendor::Default;
/// How far the canonical frame address is above the stack pointer when a function starts: the call has pushed the
/// return address. In bytes.
pub(crate) const CFA_AT_START: i64 = 8;
/// Whether a call stores the return address in a register, and not on the stack.
pub(crate) const HAS_LINK_REGISTER: bool = false;
/// Whether a frame pointer also gives the caller's stack pointer.
pub(crate) const FRAME_POINTER_GIVES_SP: bool = true;
/// Where a signal frame has the registers. The C library's unwinding information describes it here.
pub(crate) const SAVED_BY_SIGNAL: Option<SavedBySignal> = None;

/// Whether the value of this register in an expression is the address of the instruction.
pub(crate) fn is_instruction_pointer(register: Register) -> bool {
    register == RA
}

/// The registers of the function into which this one is inlined.
#[inline(always)]
pub(crate) fn registers() -> StackRegisters {
    let (ip, sp, bp);
    // SAFETY: only reads three registers.
    unsafe {
        std::arch::asm!(
            "lea {ip}, [rip]",
            "mov {sp}, rsp",
            "mov {bp}, rbp",
            ip = out(reg) ip,
            sp = out(reg) sp,
            bp = out(reg) bp,
            options(nomem, nostack, preserves_flags),
        );
    }
    StackRegisters { ip, sp, bp }
}

/// A return address as it is stored, without what is no part of the address: here it has nothing else.
#[inline(always)]
pub(crate) fn without_signature(address: usize) -> usize {
    address
}

/// Whether `code` begins with the instructions that return from a signal handler, and has no unwinding information.
pub(crate) fn is_signal_return(_code: &[u8]) -> bool {
    false
}

/// Whether the last instruction of `code` may be a call, based on the encodings at the end.
pub(crate) fn ends_with_call(code: &[u8]) -> bool {
    let from_end = |distance: usize| code.len().checked_sub(distance).and_then(|at| code.get(at..)).unwrap_or_default();
    // `call rel32`.
    if from_end(5).first() == Some(&0xe8) {
        return true;
    }
    // A call through a register or memory: FF /2, 2 to 7 bytes long, a REX prefix included.
    (2..=7).any(|length| match from_end(length) {
        [0xff, modrm, ..] => modrm >> 3 & 7 == 2,
        _ => false,
    })
}

/// Calls `visit` with the destination of each direct jump in `code`, which is at the address `start`. Bytes inside
/// other instructions may look the same.
pub(crate) fn for_each_jump(code: &[u8], start: usize, mut visit: impl FnMut(usize)) {
    for (at, bytes) in code.windows(6).enumerate() {
        // `jcc rel32` and `jmp rel32`.
        let (rel, length) = match bytes {
            [0x0f, 0x80..=0x8f, a, b, c, d] => ([*a, *b, *c, *d], 6),
            [0xe9, a, b, c, d, _] => ([*a, *b, *c, *d], 5),
            _ => continue,
        };
        visit((start + at + length).wrapping_add_signed(i32::from_le_bytes(rel) as isize));
    }
}

/// Calls the resolver of an indirect function (`STT_GNU_IFUNC`): a function without arguments.
///
/// # Safety
///
/// `resolver` is the address of such a function, in an object that is relocated.
pub(crate) unsafe fn resolve_indirect(resolver: usize) -> usize {
    // SAFETY: the caller guarantees a function of this type (x86-64 psABI).
    unsafe {
        std::mem::transmute::<*mut (), extern "C" fn() -> usize>(std::ptr::with_exposed_provenance_mut(resolver))()
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
            "mov {}, qword ptr [rip + _r_debug@GOTPCREL]",
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
            "lea {}, [rip + _DYNAMIC]",
            out(reg) address,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_instructions_are_recognized() {
        for call in [
            &[0xe8, 1, 2, 3, 4][..],
            &[0xff, 0xd0],
            &[0x41, 0xff, 0xd3],
            &[0xff, 0x50, 0x18],
            &[0xff, 0x15, 1, 2, 3, 4],
            &[0x41, 0xff, 0x94, 0x24, 1, 2, 3, 4],
        ] {
            assert!(ends_with_call(call), "{call:02x?}");
        }
        for other in [&[][..], &[0x90], &[0xff], &[0xff, 0xe0], &[0x48, 0x89, 0xe5], &[0xe8, 0, 0]] {
            assert!(!ends_with_call(other), "{other:02x?}");
        }
    }

    #[test]
    fn destinations_of_jumps_are_found() {
        let mut found = Vec::new();
        // jmp +0x10; je -6; nop.
        let code = [0xe9, 0x10, 0, 0, 0, 0x0f, 0x84, 0xfa, 0xff, 0xff, 0xff, 0x90];
        for_each_jump(&code, 0x1000, |target| found.push(target));
        assert_eq!(found, [0x1015, 0x1005]);
    }
}
