//! A call that a thread of another process makes in passing, as if a signal had interrupted it.
//!
//! The kernel lets a thread run a signal handler by two things: it writes the registers of the thread to its stack, and
//! sets them so that the handler returns to an `rt_sigreturn` system call, which restores them. [`SignalFrame`] is the
//! same, made by the tracer, with a function of the process in the place of the handler. So nothing is executed that is
//! not there already, no system call is made that the thread would not make for a signal, and one change of the
//! registers begins it all: whatever happens to the tracer before and after, the thread goes on with the program.
//!
//! The thread executes `rt_sigreturn` twice. The first time begins the call, with all signals blocked that programs may
//! block: a handler that leaves by `siglongjmp` would leave the call unfinished, with the locks of the loader. The
//! second time restores everything: general registers, flags, vector registers and the signal mask.
//!
//! ```text
//!    lower addresses
//!    the call's context          <- the stack pointer that the tracer sets
//!    return address              <- the stack pointer at the beginning of the function
//!    the program's context
//!    strings
//!    vector registers
//!    red zone
//!    ...                         <- the program's stack pointer
//! ```

use std::arch::x86_64::__cpuid_count;

use super::tracee::Registers;

/// The bytes below the stack pointer that a function may use (x86-64 ABI).
const RED_ZONE: u64 = 128;
/// The code to which signal handlers return: `mov rax, 15; syscall`. Unwinders recognize a signal frame by these very
/// bytes, so every C library has them.
pub(super) const RETURN_FROM_SIGNAL: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
/// The code segment of 64-bit programs.
const CODE_SEGMENT: u64 = 0x33;
/// The flags with which a function begins: interrupts are enabled, all others are off.
const FLAGS: u64 = 0x202;
/// The flags of `ucontext_t`: it has vector registers and a valid stack segment (asm/ucontext.h).
const CONTEXT_FLAGS: u64 = 7;
/// No valid mode of an alternate signal stack, so that the kernel leaves the thread's own as it is.
const KEEP_STACK: u64 = 0x7;
/// Signals that are not blocked meanwhile: those of errors, for which the kernel ends a process that blocks them, and
/// the two of the C library, for which `setuid` in another thread waits with the lock that `pthread_create` takes.
const NOT_BLOCKED: [i32; 8] =
    [libc::SIGILL, libc::SIGTRAP, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV, libc::SIGSYS, 32, 33];

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

/// A function to call.
pub(super) struct Call<'a> {
    pub(super) function: u64,
    /// Its first argument, a string.
    pub(super) text: &'a [u8],
    /// Its second argument.
    pub(super) number: u64,
}

/// A thread that was interrupted between two instructions.
pub(super) struct Interrupted {
    pub(super) registers: Registers,
    pub(super) signal_mask: u64,
    /// Its vector registers, as ptrace reports them.
    pub(super) extended_state: Vec<u8>,
}

/// A signal frame with which an interrupted thread calls a function and goes on.
pub(super) struct SignalFrame {
    /// Where `bytes` belong on the thread's stack.
    pub(super) address: u64,
    pub(super) bytes: Vec<u8>,
    /// The registers to set then.
    pub(super) registers: Registers,
}

/// Whether a stopped thread with these registers is between two instructions of 64-bit code: in no system call, or in
/// one that is over.
pub(super) fn is_between_instructions(registers: &Registers) -> bool {
    /// The results of system calls that the kernel repeats (`ERESTARTSYS` and others), and `EINTR`.
    const REPEATED: [i64; 5] = [-512, -513, -514, -516, -(libc::EINTR as i64)];
    let is_in_call = registers.orig_rax as i64 >= 0 && REPEATED.contains(&(registers.rax as i64));
    registers.cs == CODE_SEGMENT && !is_in_call
}

impl SignalFrame {
    /// The frame for a thread. `return_from_signal` is where the process has [`RETURN_FROM_SIGNAL`].
    ///
    /// `None` if the thread's registers are not understood.
    pub(super) fn new(thread: &Interrupted, call: &Call<'_>, return_from_signal: u64) -> Option<SignalFrame> {
        let before = &thread.registers;
        if !is_between_instructions(before) {
            return None;
        }
        let state = with_layout(&thread.extended_state)?;
        let align = |address: u64, to: u64| address & !(to - 1);
        let top = before.rsp.checked_sub(RED_ZONE)?;
        let state_at = align(top.checked_sub(state.len() as u64)?, 64);
        let text_at = state_at.checked_sub(call.text.len() as u64 + 1)?;
        let context_size = (CONTEXT_WORDS * 8) as u64;
        // A function begins with a stack pointer that is 8 below a multiple of 16 (x86-64 ABI).
        let program_at = align(text_at.checked_sub(context_size)?, 16);
        let return_at = program_at - 8;
        let call_at = return_at - context_size;

        let program = context(before, thread.signal_mask, state_at);
        let called = Registers {
            rip: call.function,
            rsp: return_at,
            rdi: text_at,
            rsi: call.number,
            eflags: FLAGS,
            // No caller, for unwinders by frame pointers.
            rbp: 0,
            ..*before
        };
        let unblocked = NOT_BLOCKED.iter().fold(0, |set, signal| set | 1 << (signal - 1));
        let call_context = context(&called, thread.signal_mask | !unblocked, state_at);

        let mut bytes = vec![0; (before.rsp - call_at) as usize];
        let mut put = |at: u64, data: &[u8]| {
            let at = (at - call_at) as usize;
            bytes.get_mut(at..at + data.len()).map(|place| place.copy_from_slice(data))
        };
        put(call_at, &to_bytes(&call_context))?;
        put(return_at, &return_from_signal.to_ne_bytes())?;
        put(program_at, &to_bytes(&program))?;
        put(text_at, call.text)?;
        put(state_at, &state)?;
        bytes.truncate((top - call_at) as usize);
        let registers =
            Registers { rip: return_from_signal, rsp: call_at, orig_rax: u64::MAX, eflags: FLAGS, ..*before };
        Some(SignalFrame { address: call_at, bytes, registers })
    }

    /// The part of the frame that stays as it is until the program goes on: its address and its bytes.
    pub(super) fn unchanged_part(&self) -> (u64, &[u8]) {
        let at = CONTEXT_WORDS * 8;
        (self.address + at as u64, self.bytes.get(at..).unwrap_or_default())
    }
}

/// The words of `struct ucontext` up to the signal mask (asm-generic/ucontext.h, `struct sigcontext_64`).
const CONTEXT_WORDS: usize = 38;

fn context(registers: &Registers, signal_mask: u64, state_at: u64) -> [u64; CONTEXT_WORDS] {
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

fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
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
