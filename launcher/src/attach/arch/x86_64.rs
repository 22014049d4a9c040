//! x86-64: the System V psABI of Linux.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::io;

use gimli::{Register, Vendor, X86_64};

use super::frame::{
    Bytes, Call, Interrupted, KEEP_STACK, NT_PRSTATUS, Prepared, align_down, read_register_set, to_bytes,
};

/// The general registers of a thread.
#[derive(Clone, Copy)]
pub(in crate::attach) struct Registers(libc::user_regs_struct);

/// The vector registers of a thread, as the `xsave` instruction writes them.
pub(in crate::attach) type ExtendedState = Vec<u8>;

/// The beginning of the name of glibc's dynamic loader.
pub(in crate::attach) const LOADER: &[u8] = b"ld-linux-x86-64.so.2";
/// The code to which signal handlers return: `mov rax, 15; syscall`. Unwinders recognize a signal frame by these very
/// bytes, so every C library has them.
pub(in crate::attach) const RETURN_FROM_SIGNAL: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
/// Whether the kernel shows all registers of a thread as they are when it has stopped at the end of a system call.
pub(in crate::attach) const SHOWS_REGISTERS_AT_CALLS: bool = true;
/// Whether [`Registers::repeating_call`] can repeat the system calls that the kernel does not repeat itself.
pub(in crate::attach) const REPEATS_CALLS: bool = true;
/// The system calls that end when the thread is interrupted, and that the kernel does not repeat.
pub(in crate::attach) const NOT_REPEATED: [libc::c_long; 3] =
    [libc::SYS_epoll_wait, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];

/// Whose extensions of unwinding information are used.
pub(in crate::attach) const VENDOR: Vendor = Vendor::Default;
/// The registers that a function preserves, by their numbers in the unwinding information.
pub(in crate::attach) const PRESERVED: [Register; 6] =
    [X86_64::RBX, X86_64::RBP, X86_64::R12, X86_64::R13, X86_64::R14, X86_64::R15];
pub(in crate::attach) const SP: Register = X86_64::RSP;
/// The column of the return address.
pub(in crate::attach) const RA: Register = X86_64::RA;

/// The bytes below the stack pointer that a function may use (x86-64 ABI).
const RED_ZONE: u64 = 128;
/// The code segment of 64-bit programs.
const CODE_SEGMENT: u64 = 0x33;
/// The flags with which a function begins: interrupts are enabled, all others are off.
const FLAGS: u64 = 0x202;
/// The flags of `ucontext_t`: it has vector registers and a valid stack segment (asm/ucontext.h).
const CONTEXT_FLAGS: u64 = 7;

/// `NT_X86_XSTATE` of linux/elf.h.
const NT_X86_XSTATE: usize = 0x202;
/// The largest state of a processor's vector and matrix registers, in bytes.
const MAX_STATE: usize = 32 << 10;
/// Where the kernel notes the layout of the vector registers (`struct _fpx_sw_bytes`).
const LAYOUT_AT: usize = 464;
/// Where `xsave` notes which registers differ from their initial values.
const IN_USE_AT: usize = 512;
/// The size of the registers that every processor has, with the header behind them.
const LEGACY_SIZE: usize = 576;
/// The registers that a thread must request from the kernel, and for which memory is provided at their first use: AMX
/// tiles.
const ON_REQUEST: u64 = 1 << 18;
const MAGIC_1: u32 = 0x4650_5853;
const MAGIC_2: u32 = 0x4650_5845;

impl Registers {
    /// Those of a stopped thread, from the kernel's set of general registers.
    pub(in crate::attach) fn read(tid: i32) -> io::Result<Registers> {
        // SAFETY: the structure is plain data, for which zeros are valid.
        let mut registers = Registers(unsafe { std::mem::zeroed() });
        read_register_set(tid, NT_PRSTATUS, registers.bytes_mut())?;
        Ok(registers)
    }

    /// The bytes of the kernel's set of general registers.
    pub(in crate::attach) fn bytes_mut(&mut self) -> &mut [u8] {
        let start = (&raw mut self.0).cast::<u8>();
        // SAFETY: the structure is plain data without padding, and the result borrows it.
        unsafe { std::slice::from_raw_parts_mut(start, size_of::<libc::user_regs_struct>()) }
    }

    /// The address of the next instruction.
    pub(in crate::attach) fn instruction(&self) -> u64 {
        self.0.rip
    }

    pub(in crate::attach) fn stack_pointer(&self) -> u64 {
        self.0.rsp
    }

    /// The register with the return address, if calls use one.
    pub(in crate::attach) fn link(&self) -> Option<u64> {
        None
    }

    /// The values of [`PRESERVED`].
    pub(in crate::attach) fn preserved(&self) -> [u64; PRESERVED.len()] {
        let r = &self.0;
        [r.rbx, r.rbp, r.r12, r.r13, r.r14, r.r15]
    }

    /// Whether a stopped thread with these registers is between two instructions of 64-bit code: in no system call, or
    /// in one that is over. `code` reads an address of the thread's memory.
    pub(in crate::attach) fn is_between_instructions(&self, _code: impl Fn(u64) -> Option<u64>) -> bool {
        /// The results of system calls that the kernel repeats (`ERESTARTSYS` and others), and `EINTR`.
        const REPEATED: [i64; 5] = [-512, -513, -514, -516, -(libc::EINTR as i64)];
        let is_in_call = self.0.orig_rax as i64 >= 0 && REPEATED.contains(&(self.0.rax as i64));
        self.0.cs == CODE_SEGMENT && !is_in_call
    }

    /// The registers with which a thread repeats a system call of [`NOT_REPEATED`] that the interruption has ended.
    /// `None` if it was in no such call.
    pub(in crate::attach) fn repeating_call(&self) -> Option<Registers> {
        /// The kernel's result of a call that is repeated unless a handler has run (`ERESTARTNOHAND`).
        const REPEAT: i64 = -514;
        let is_ended = self.0.rax as i64 == -i64::from(libc::EINTR) && NOT_REPEATED.contains(&(self.0.orig_rax as i64));
        is_ended.then_some(Registers(libc::user_regs_struct { rax: REPEAT as u64, ..self.0 }))
    }
}

/// The vector and matrix registers of a stopped thread.
pub(in crate::attach) fn extended_state(tid: i32) -> io::Result<ExtendedState> {
    let mut bytes = vec![0u8; MAX_STATE];
    let length = read_register_set(tid, NT_X86_XSTATE, &mut bytes)?;
    bytes.truncate(length);
    Ok(bytes)
}

/// A return address as it is stored, without what is no part of the address.
pub(in crate::attach) fn without_signature(address: u64) -> u64 {
    address
}

/// Prepares a call. `return_from_signal` is where the process has [`RETURN_FROM_SIGNAL`]. The call is made with the
/// signals of `unblocked` not blocked. `None` if the thread's registers are not understood.
///
/// ```text
///    lower addresses
///    the call's context          <- the stack pointer that the tracer sets
///    return address              <- the stack pointer at the beginning of the function
///    the program's context
///    strings
///    vector registers
///    red zone
///    ...                         <- the program's stack pointer
/// ```
pub(in crate::attach) fn prepare(
    thread: &Interrupted<Registers, ExtendedState>,
    call: &Call<'_>,
    return_from_signal: u64,
    unblocked: u64,
) -> Option<Prepared<Registers>> {
    let before = &thread.registers.0;
    let state = with_layout(&thread.extended_state)?;
    let top = before.rsp.checked_sub(RED_ZONE)?;
    let state_at = align_down(top.checked_sub(state.len() as u64)?, 64);
    let text_at = state_at.checked_sub(call.text.len() as u64 + 1)?;
    let context_size = (CONTEXT_WORDS * 8) as u64;
    // A function begins with a stack pointer that is 8 below a multiple of 16 (x86-64 ABI).
    let program_at = align_down(text_at.checked_sub(context_size)?, 16);
    let return_at = program_at.checked_sub(8)?;
    let call_at = return_at.checked_sub(context_size)?;

    let program = context(before, thread.signal_mask, state_at);
    let called = libc::user_regs_struct {
        rip: call.function,
        rsp: return_at,
        rdi: text_at,
        rsi: call.number,
        eflags: FLAGS,
        // No caller, for unwinders by frame pointers.
        rbp: 0,
        ..*before
    };
    let call_context = context(&called, thread.signal_mask | !unblocked, state_at);

    let mut bytes = Bytes::new(call_at, top)?;
    bytes.put(call_at, &to_bytes(&call_context))?;
    bytes.put(return_at, &return_from_signal.to_ne_bytes())?;
    bytes.put(program_at, &to_bytes(&program))?;
    bytes.put(text_at, call.text)?;
    bytes.put(state_at, &state)?;
    let registers =
        libc::user_regs_struct { rip: return_from_signal, rsp: call_at, orig_rax: u64::MAX, eflags: FLAGS, ..*before };
    let unchanged_from = CONTEXT_WORDS * 8;
    Some(Prepared { address: call_at, bytes: bytes.bytes, unchanged_from, registers: Registers(registers) })
}

/// The words of `struct ucontext` up to the signal mask (asm-generic/ucontext.h, `struct sigcontext_64`).
const CONTEXT_WORDS: usize = 38;

fn context(registers: &libc::user_regs_struct, signal_mask: u64, state_at: u64) -> [u64; CONTEXT_WORDS] {
    let r = registers;
    let segments = (r.cs & 0xffff) | (r.ss & 0xffff) << 48;
    let general = [
        r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax, r.rcx, r.rsp,
        r.rip, r.eflags, segments,
    ];
    let mut words = [0; CONTEXT_WORDS];
    let parts: [(usize, &[u64]); 5] =
        [(0, &[CONTEXT_FLAGS]), (3, &[KEEP_STACK]), (5, &general), (28, &[state_at]), (37, &[signal_mask])];
    for (at, part) in parts {
        words.iter_mut().skip(at).zip(part).for_each(|(word, value)| *word = *value);
    }
    words
}

/// The vector registers with the description of their layout that `rt_sigreturn` requires. Without it, the kernel would
/// restore only the oldest of them.
///
/// `None` for a layout that this function does not know, and for a thread that uses registers beyond it.
fn with_layout(state: &[u8]) -> Option<Vec<u8>> {
    let word = |at: usize| state.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes);
    // ptrace reports here which registers the processor has.
    let present = word(LAYOUT_AT)? & !ON_REQUEST;
    let end_of = |number: u32| {
        let part = __cpuid_count(0xd, number);
        (part.ebx + part.eax) as usize
    };
    let parts = (2..63).filter(|number| present >> number & 1 != 0);
    let size = parts.map(end_of).fold(LEGACY_SIZE, usize::max);
    if present & 3 != 3 || state.len() < size || word(IN_USE_AT)? & !present != 0 {
        return None;
    }
    let mut bytes = state.get(..size)?.to_vec();
    let with_magic = size as u32 + 4;
    let layout =
        [&MAGIC_1.to_ne_bytes()[..], &with_magic.to_ne_bytes(), &present.to_ne_bytes(), &(size as u32).to_ne_bytes()];
    let mut layout = layout.concat();
    layout.resize(IN_USE_AT - LAYOUT_AT, 0);
    bytes.get_mut(LAYOUT_AT..IN_USE_AT)?.copy_from_slice(&layout);
    bytes.extend_from_slice(&MAGIC_2.to_ne_bytes());
    Some(bytes)
}

/// Changes vector registers that a function may change, as a whole.
pub(in crate::attach) fn change_vector_registers() {
    // SAFETY: changes only registers that a function may change.
    unsafe {
        if is_x86_feature_detected!("avx512f") {
            asm!("vpxord zmm17, zmm17, zmm17", options(nostack, nomem));
        }
        if is_x86_feature_detected!("avx") {
            asm!("vzeroall", out("xmm0") _, out("xmm1") _, out("xmm7") _, options(nostack, nomem));
        } else {
            asm!("pxor xmm7, xmm7", out("xmm7") _, options(nostack, nomem));
        }
    }
}

/// Fills registers with values, waits until another process sets a word, and returns whether they have the same values.
///
/// # Safety
///
/// `over` is the word.
pub(in crate::attach) unsafe fn keeps_registers_until(over: *mut u32) -> bool {
    /// The largest vector register in bytes.
    const VECTOR: usize = 64;
    let before: [u8; VECTOR] = std::array::from_fn(|at| at as u8 + 1);
    let mut after = [0u8; VECTOR];
    let general = [3u64, 5, 7, 11];
    let [mut rcx, mut r9, mut r12, mut r15] = general;
    macro_rules! spin_with {
        ($load:literal, $store:literal) => {
            // SAFETY: reads the vector and the word, and writes the vector. The loop ends when the other process has
            // set the word.
            unsafe {
                asm!(
                    $load, "2:", "pause", "cmp dword ptr [{over}], 0", "je 2b", $store,
                    before = in(reg) before.as_ptr(),
                    after = in(reg) after.as_mut_ptr(),
                    over = in(reg) over,
                    inout("rcx") rcx, inout("r9") r9, inout("r12") r12, inout("r15") r15,
                    out("xmm7") _,
                    options(nostack),
                )
            }
        };
    }
    let size = if is_x86_feature_detected!("avx512f") {
        spin_with!("vmovups zmm17, [{before}]", "vmovups [{after}], zmm17");
        64
    } else if is_x86_feature_detected!("avx") {
        spin_with!("vmovups ymm7, [{before}]", "vmovups [{after}], ymm7");
        32
    } else {
        spin_with!("movups xmm7, [{before}]", "movups [{after}], xmm7");
        16
    };
    after.get(..size) == before.get(..size) && [rcx, r9, r12, r15] == general
}
