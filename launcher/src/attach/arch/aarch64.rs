//! AArch64: the AAPCS64 on Linux (arch/arm64/kernel/{signal,ptrace}.c, asm/sigcontext.h).
//!
//! Not yet run on such a machine, because ptrace is missing under emulation. [`super::super::rehearsal`] compares all
//! registers on a child of this process before another process is touched, so an error here is a refusal.

use std::arch::asm;
use std::io;

use gimli::{AArch64, Register, Vendor};

use super::frame::{
    Bytes, Call, Interrupted, KEEP_STACK, NT_PRSTATUS, Prepared, align_down, read_register_set, to_bytes,
};

/// The general registers of a thread: `x0` to `x30`, `sp`, `pc` and `pstate`.
#[derive(Clone, Copy)]
pub(in crate::attach) struct Registers([u64; 34]);

/// The vector registers of a thread.
pub(in crate::attach) struct ExtendedState {
    /// `q0` to `q31`, `fpsr` and `fpcr`: `struct user_fpsimd_state`.
    fpsimd: [u8; FPSIMD_BYTES],
    /// The registers of SVE, if the thread uses them: `struct user_sve_header` and what follows it.
    sve: Option<Vec<u8>>,
}

/// The beginning of the name of glibc's dynamic loader.
pub(in crate::attach) const LOADER: &[u8] = b"ld-linux-aarch64.so.1";
/// The code to which signal handlers return: `mov x8, #139; svc #0`. The vDSO has it.
pub(in crate::attach) const RETURN_FROM_SIGNAL: [u8; 8] = [0x68, 0x11, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4];
/// Whether the kernel shows all registers of a thread as they are when it has stopped at the end of a system call: `x7`
/// says there whether it is the beginning or the end.
pub(in crate::attach) const SHOWS_REGISTERS_AT_CALLS: bool = false;
/// Whether [`Registers::repeating_call`] can repeat the system calls that the kernel does not repeat itself: the first
/// argument is lost when the call has ended.
pub(in crate::attach) const REPEATS_CALLS: bool = false;
/// The system calls that end when the thread is interrupted, and that the kernel does not repeat.
pub(in crate::attach) const NOT_REPEATED: [libc::c_long; 2] = [libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];

/// Whose extensions of unwinding information are used.
pub(in crate::attach) const VENDOR: Vendor = Vendor::AArch64;
/// The registers that a function preserves, by their numbers in the unwinding information.
pub(in crate::attach) const PRESERVED: [Register; 11] = [
    AArch64::X19,
    AArch64::X20,
    AArch64::X21,
    AArch64::X22,
    AArch64::X23,
    AArch64::X24,
    AArch64::X25,
    AArch64::X26,
    AArch64::X27,
    AArch64::X28,
    AArch64::X29,
];
pub(in crate::attach) const SP: Register = AArch64::SP;
/// The column of the return address.
pub(in crate::attach) const RA: Register = AArch64::X30;

const LINK: usize = 30;
const STACK_POINTER: usize = 31;
const PC: usize = 32;
const PSTATE: usize = 33;
/// Bits of `pstate`: 32-bit code; what the kernel clears for a signal handler (`setup_return`): the kind of the last
/// branch, and the checks of memory tags; and the conditions.
const MODE_32_BIT: u64 = 1 << 4;
const CLEARED: u64 = 3 << 10 | 1 << 25 | 0xf << 28;
/// `svc #0`.
const SYSTEM_CALL: u32 = 0xd400_0001;

/// Sets of registers (linux/elf.h): SVE, streaming SVE, the array of SME, and guarded control stacks.
const NT_PRFPREG: usize = 2;
const NT_ARM_SVE: usize = 0x405;
const NT_ARM_SSVE: usize = 0x40b;
const NT_ARM_ZA: usize = 0x40c;
const NT_ARM_GCS: usize = 0x410;
const FPSIMD_BYTES: usize = 528;
/// `struct user_sve_header`: size, largest size, vector length in bytes, largest one, flags.
const SVE_HEADER: usize = 16;
const SVE_LENGTH_AT: usize = 8;
const SVE_FLAGS_AT: usize = 12;
const SVE_HAS_REGISTERS: u16 = 1;
const MAX_STATE: usize = 32 << 10;

/// `struct rt_sigframe`: where its parts are, in bytes.
const FLAGS_AT: u64 = 128;
const STACK_FLAGS_AT: u64 = FLAGS_AT + 24;
const SIGNAL_MASK_AT: u64 = FLAGS_AT + 40;
const GENERAL_AT: u64 = FLAGS_AT + 176 + 8;
const RESERVED_AT: u64 = FLAGS_AT + 176 + 288;
const RESERVED: u64 = 4096;
const FRAME: u64 = RESERVED_AT + RESERVED;
const FPSIMD_MAGIC: u32 = 0x4650_8001;
const SVE_MAGIC: u32 = 0x5356_4501;

impl Registers {
    /// Those of a stopped thread, from the kernel's set of general registers.
    pub(in crate::attach) fn read(tid: i32) -> io::Result<Registers> {
        let mut registers = Registers([0; 34]);
        read_register_set(tid, NT_PRSTATUS, registers.bytes_mut())?;
        Ok(registers)
    }

    /// The bytes of the kernel's set of general registers.
    pub(in crate::attach) fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = size_of_val(&self.0);
        // SAFETY: the words have no padding, and the result borrows them.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), bytes) }
    }

    /// The address of the next instruction.
    pub(in crate::attach) fn instruction(&self) -> u64 {
        self.0[PC]
    }

    pub(in crate::attach) fn stack_pointer(&self) -> u64 {
        self.0[STACK_POINTER]
    }

    /// The register with the return address, if calls use one.
    pub(in crate::attach) fn link(&self) -> Option<u64> {
        Some(self.0[LINK])
    }

    /// The values of [`PRESERVED`].
    pub(in crate::attach) fn preserved(&self) -> [u64; PRESERVED.len()] {
        std::array::from_fn(|at| self.0[19 + at])
    }

    /// Whether a stopped thread with these registers is between two instructions of 64-bit code. `code` reads an
    /// address of the thread's memory.
    ///
    /// A system call that is repeated begins at its instruction again, which the kernel has prepared before the thread
    /// stops. It may still replace the call by one that waits for the rest of the time. So a thread at such an
    /// instruction is not between two.
    pub(in crate::attach) fn is_between_instructions(&self, code: impl Fn(u64) -> Option<u64>) -> bool {
        let instruction = code(self.0[PC]).map(|word| word as u32);
        self.0[PSTATE] & MODE_32_BIT == 0 && instruction.is_some_and(|instruction| instruction != SYSTEM_CALL)
    }

    /// [`REPEATS_CALLS`]
    pub(in crate::attach) fn repeating_call(&self) -> Option<Registers> {
        None
    }
}

/// The vector registers of a stopped thread. The error is `Unsupported` for a thread that uses the matrix registers of
/// SME or a guarded control stack, which would have to be restored too.
pub(in crate::attach) fn extended_state(tid: i32) -> io::Result<ExtendedState> {
    let mut fpsimd = [0; FPSIMD_BYTES];
    read_register_set(tid, NT_PRFPREG, &mut fpsimd)?;
    let read = |set: usize| {
        let mut bytes = vec![0; MAX_STATE];
        let length = read_register_set(tid, set, &mut bytes).ok()?;
        bytes.truncate(length);
        Some(bytes)
    };
    let has_registers = |bytes: &[u8]| half(bytes, SVE_FLAGS_AT).is_some_and(|flags| flags & SVE_HAS_REGISTERS != 0);
    let is_streaming = read(NT_ARM_SSVE).is_some_and(|bytes| has_registers(&bytes));
    // The array follows its header only while it is in use.
    let has_array = read(NT_ARM_ZA).is_some_and(|bytes| bytes.len() > SVE_HEADER);
    let has_guarded_stack = read(NT_ARM_GCS).is_some_and(|bytes| bytes.first().is_some_and(|flags| flags & 1 != 0));
    if is_streaming || has_array || has_guarded_stack {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(ExtendedState { fpsimd, sve: read(NT_ARM_SVE).filter(|bytes| has_registers(bytes)) })
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A return address as it is stored, without its signature (pointer authentication).
pub(in crate::attach) fn without_signature(address: u64) -> u64 {
    let mut stripped = address;
    // SAFETY: changes one register (XPACLRI). Processors without that feature execute it as a no-op.
    unsafe { asm!("hint #7", inout("x30") stripped, options(pure, nomem, nostack, preserves_flags)) };
    stripped
}

/// Prepares a call. `return_from_signal` is where the process has [`RETURN_FROM_SIGNAL`]. The call is made with the
/// signals of `unblocked` not blocked. `None` if the thread's registers are not understood.
///
/// ```text
///    lower addresses
///    the call's context          <- the stack pointer that the tracer sets
///    the program's context       <- the stack pointer at the beginning of the function
///    strings
///    ...                         <- the program's stack pointer
/// ```
pub(in crate::attach) fn prepare(
    thread: &Interrupted<Registers, ExtendedState>,
    call: &Call<'_>,
    return_from_signal: u64,
    unblocked: u64,
) -> Option<Prepared<Registers>> {
    let before = &thread.registers.0;
    let vectors = records(&thread.extended_state)?;
    let top = before[STACK_POINTER];
    let text_at = top.checked_sub(call.text.len() as u64 + 1)?;
    let program_at = align_down(text_at.checked_sub(FRAME)?, 16);
    let call_at = program_at.checked_sub(FRAME)?;
    let mut called = *before;
    called[0] = text_at;
    called[1] = call.number;
    // No caller, for unwinders by frame pointers.
    called[29] = 0;
    called[LINK] = return_from_signal;
    called[STACK_POINTER] = program_at;
    called[PC] = call.function;
    called[PSTATE] &= !CLEARED;
    let mut bytes = Bytes::new(call_at, top)?;
    for (at, registers, mask) in
        [(call_at, &called, thread.signal_mask | !unblocked), (program_at, before, thread.signal_mask)]
    {
        bytes.put(at + STACK_FLAGS_AT, &KEEP_STACK.to_ne_bytes())?;
        bytes.put(at + SIGNAL_MASK_AT, &mask.to_ne_bytes())?;
        bytes.put(at + GENERAL_AT, &to_bytes(registers))?;
        bytes.put(at + RESERVED_AT, &vectors)?;
    }
    bytes.put(text_at, call.text)?;
    let mut registers = *before;
    registers[STACK_POINTER] = call_at;
    registers[PC] = return_from_signal;
    registers[PSTATE] &= !CLEARED;
    let registers = Registers(registers);
    Some(Prepared { address: call_at, bytes: bytes.bytes, unchanged_from: FRAME as usize, registers })
}

/// The records of vector registers in a signal frame. `None` if they do not fit, with vectors of more than 64 bytes.
fn records(state: &ExtendedState) -> Option<Vec<u8>> {
    // The end: no magic number and no size.
    const END: usize = 16;
    let (registers, status) = state.fpsimd.split_at(512);
    let mut records = Vec::new();
    let head = |magic: u32, size: usize| [magic.to_ne_bytes(), (size as u32).to_ne_bytes()].concat();
    records.extend(head(FPSIMD_MAGIC, FPSIMD_BYTES));
    records.extend_from_slice(status.get(..8)?);
    records.extend_from_slice(registers);
    if let Some(sve) = &state.sve {
        let length = half(sve, SVE_LENGTH_AT)?;
        // 32 vectors, and 16 predicates and the first-fault register, each of a bit for a byte.
        let bytes = usize::from(length) * 32 + usize::from(length) / 8 * 17;
        let size = (SVE_HEADER + bytes).next_multiple_of(16);
        let start = records.len();
        records.extend(head(SVE_MAGIC, size));
        records.extend(length.to_ne_bytes());
        records.resize(start + SVE_HEADER, 0);
        records.extend_from_slice(sve.get(SVE_HEADER..SVE_HEADER + bytes)?);
        records.resize(start + size, 0);
    }
    (records.len() + END <= RESERVED as usize).then_some(records)
}

/// Changes vector registers that a function may change.
pub(in crate::attach) fn change_vector_registers() {
    // SAFETY: changes only registers that a function may change.
    unsafe {
        asm!(
            "movi v0.16b, #0",
            "movi v7.16b, #0",
            "movi v17.16b, #0",
            "movi v31.16b, #0",
            out("v0") _, out("v7") _, out("v17") _, out("v31") _,
            options(nostack, nomem),
        );
    }
}

/// Fills registers with values, waits until another process sets a word, and returns whether they have the same values.
///
/// # Safety
///
/// `over` is the word.
pub(in crate::attach) unsafe fn keeps_registers_until(over: *mut u32) -> bool {
    const VECTORS: usize = 64;
    let before: [u8; VECTORS] = std::array::from_fn(|at| at as u8 + 1);
    let mut after = [0u8; VECTORS];
    let general = [3u64, 5, 7, 11, 13];
    let [mut x1, mut x7, mut x16, mut x24, mut x28] = general;
    // SAFETY: reads the vectors and the word, and writes the vectors. The loop ends when the other process has set the
    // word.
    unsafe {
        asm!(
            "ldp q0, q7, [{before}]",
            "ldp q17, q31, [{before}, #32]",
            "2:",
            "yield",
            "ldar {word:w}, [{over}]",
            "cbz {word:w}, 2b",
            "stp q0, q7, [{after}]",
            "stp q17, q31, [{after}, #32]",
            before = in(reg) before.as_ptr(),
            after = in(reg) after.as_mut_ptr(),
            over = in(reg) over,
            word = out(reg) _,
            inout("x1") x1, inout("x7") x7, inout("x16") x16, inout("x24") x24, inout("x28") x28,
            out("v0") _, out("v7") _, out("v17") _, out("v31") _,
            options(nostack),
        );
    }
    after == before && [x1, x7, x16, x24, x28] == general
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_frame_has_what_the_kernel_restores() {
        let general = Registers(std::array::from_fn(|at| match at {
            STACK_POINTER => 0x7000_0001_0000,
            PSTATE => 0x6000_0c00,
            _ => 0x100 + at as u64,
        }));
        let fpsimd = std::array::from_fn(|at| at as u8);
        let mut sve = vec![0u8; SVE_HEADER + 16 * 32 + 2 * 17];
        sve[SVE_LENGTH_AT] = 16;
        sve[SVE_FLAGS_AT] = 1;
        sve[SVE_HEADER] = 77;
        let state = ExtendedState { fpsimd, sve: Some(sve) };
        let thread = Interrupted { registers: general, signal_mask: 5, extended_state: state };
        let call = Call { function: 0x4000, text: b"text", number: 9 };
        let prepared = prepare(&thread, &call, 0x8000, 0).unwrap();
        let word = |at: u64| {
            let at = (at - prepared.address) as usize;
            u64::from_ne_bytes(*prepared.bytes[at..].first_chunk().unwrap())
        };
        let (call_at, program_at) = (prepared.address, prepared.address + FRAME);
        assert!(call_at.is_multiple_of(16));
        assert_eq!((prepared.registers.instruction(), prepared.registers.stack_pointer()), (0x8000, call_at));
        let register = |frame: u64, index: usize| word(frame + GENERAL_AT + index as u64 * 8);
        assert_eq!((register(call_at, PC), register(call_at, LINK), register(call_at, 1)), (0x4000, 0x8000, 9));
        assert_eq!((register(call_at, STACK_POINTER), register(call_at, PSTATE)), (program_at, 0));
        assert_eq!(&prepared.bytes[(register(call_at, 0) - call_at) as usize..][..5], b"text\0");
        assert!((0..34).all(|index| register(program_at, index) == general.0[index]), "the program's");
        assert_eq!((word(program_at + SIGNAL_MASK_AT), word(call_at + SIGNAL_MASK_AT)), (5, u64::MAX));
        let vectors = program_at + RESERVED_AT;
        assert_eq!(word(vectors), u64::from(FPSIMD_MAGIC) | 528 << 32);
        assert_eq!((word(vectors + 528), word(vectors + 536)), (u64::from(SVE_MAGIC) | 576 << 32, 16));
        assert_eq!((word(vectors + 544) & 0xff, word(vectors + 528 + 576)), (77, 0));
        let too_long = ExtendedState { fpsimd, sve: Some([&[0; 9][..], &[1], &[0; 20_000]].concat()) };
        assert!(records(&too_long).is_none(), "vectors of 256 bytes");
    }
}
