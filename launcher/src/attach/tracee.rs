//! The threads of another process, as its tracer sees them (ptrace(2)).
//!
//! Every function concerns a thread that this process has seized. `PTRACE_O_EXITKILL` is never set: the end of the
//! tracer ends no traced process.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// `siginfo_t.si_code` of a SIGTRAP that `int3` has raised.
const SI_KERNEL: i32 = 0x80;
/// How long a thread may take to stop or to make one step.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The registers of a thread.
pub(super) type Registers = libc::user_regs_struct;

/// Why a thread has stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stop {
    /// It is about to get this signal.
    Signal(i32),
    /// It has started a thread.
    Cloned,
    /// The tracer has interrupted it, or it is new.
    Interrupted,
    /// This signal has stopped the whole process.
    Group(i32),
    /// It has ended.
    Ended,
}

impl Stop {
    fn of(status: i32) -> Stop {
        if !libc::WIFSTOPPED(status) {
            return Stop::Ended;
        }
        let signal = libc::WSTOPSIG(status);
        match status >> 16 {
            0 => Stop::Signal(signal),
            libc::PTRACE_EVENT_STOP if signal == libc::SIGTRAP => Stop::Interrupted,
            libc::PTRACE_EVENT_STOP => Stop::Group(signal),
            _ => Stop::Cloned,
        }
    }
}

fn call(request: libc::c_uint, tid: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the requests used here read or write only the traced process, or the memory that `data` points to, which
    // callers provide in the size that the request needs.
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Begins to trace a thread without stopping it. Threads that it starts are traced too.
pub(super) fn seize(tid: i32) -> io::Result<()> {
    call(libc::PTRACE_SEIZE, tid, 0, libc::PTRACE_O_TRACECLONE as usize)
}

/// Stops a thread. [`wait_for`] reports when it has stopped.
pub(super) fn interrupt(tid: i32) -> io::Result<()> {
    call(libc::PTRACE_INTERRUPT, tid, 0, 0)
}

/// Continues a stopped thread, which gets `signal` (0 for none).
pub(super) fn resume(tid: i32, signal: i32) {
    let _ = call(libc::PTRACE_CONT, tid, 0, signal as usize);
}

/// Leaves a thread in the stop of its process, and reports what happens to it.
pub(super) fn listen(tid: i32) {
    let _ = call(libc::PTRACE_LISTEN, tid, 0, 0);
}

/// Ends tracing a stopped thread, which continues and gets `signal` (0 for none).
pub(super) fn detach(tid: i32, signal: i32) {
    let _ = call(libc::PTRACE_DETACH, tid, 0, signal as usize);
}

/// The registers of a stopped thread.
pub(super) fn registers(tid: i32) -> io::Result<Registers> {
    let mut registers = MaybeUninit::<Registers>::uninit();
    call(libc::PTRACE_GETREGS, tid, 0, registers.as_mut_ptr().addr())?;
    // SAFETY: the kernel has written all registers.
    Ok(unsafe { registers.assume_init() })
}

/// Sets the registers of a stopped thread.
pub(super) fn set_registers(tid: i32, registers: &Registers) -> io::Result<()> {
    call(libc::PTRACE_SETREGS, tid, 0, std::ptr::from_ref(registers).addr())
}

/// Whether a thread that is about to get a SIGTRAP has executed `int3`.
pub(super) fn is_breakpoint(tid: i32) -> bool {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let is_read = call(libc::PTRACE_GETSIGINFO, tid, 0, info.as_mut_ptr().addr()).is_ok();
    // SAFETY: zeros are a valid `siginfo_t`, and the kernel writes a whole one.
    is_read && unsafe { info.assume_init() }.si_code == SI_KERNEL
}

/// The next stop of any traced thread. `None` if there is none now. The error is `ECHILD` if no thread is traced.
pub(super) fn next_stop() -> io::Result<Option<(i32, Stop)>> {
    wait(-1)
}

fn wait(tid: i32) -> io::Result<Option<(i32, Stop)>> {
    let mut status = 0;
    // SAFETY: `status` is writable.
    match unsafe { libc::waitpid(tid, &mut status, libc::__WALL | libc::WNOHANG) } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        tid => Ok(Some((tid, Stop::of(status)))),
    }
}

/// Waits until a thread stops. The error is `TimedOut` if that takes too long: a thread in the kernel cannot be stopped.
pub(super) fn wait_for(tid: i32) -> io::Result<Stop> {
    let began = Instant::now();
    loop {
        if let Some((_, stop)) = wait(tid)? {
            return Ok(stop);
        }
        if began.elapsed() > STOP_TIMEOUT {
            return Err(io::ErrorKind::TimedOut.into());
        }
        pause(Duration::from_micros(50));
    }
}

/// Waits until the state of a traced thread changes, at most this long. SIGCHLD must be blocked.
pub(super) fn pause(limit: Duration) {
    let limit = libc::timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    // SAFETY: `sigemptyset` initializes the set before its use. The pointers are valid or null.
    unsafe {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
        libc::sigtimedwait(set.as_ptr(), null_mut(), &limit);
    }
}

/// Lets a stopped thread execute one system call. Its registers are afterwards as before. Signals that arrive meanwhile
/// are appended to `signals`, for the thread to get later.
///
/// `instruction` is the address of a `syscall` instruction in the process.
pub(super) fn system_call(
    tid: i32,
    instruction: u64,
    number: i64,
    arguments: [u64; 6],
    signals: &mut Vec<i32>,
) -> io::Result<u64> {
    let before = registers(tid)?;
    let [rdi, rsi, rdx, r10, r8, r9] = arguments;
    let rax = number as u64;
    // Without a system call to restart (`orig_rax`), the kernel changes no register on its own.
    let changed = Registers { rip: instruction, rax, orig_rax: u64::MAX, rdi, rsi, rdx, r10, r8, r9, ..before };
    set_registers(tid, &changed)?;
    let result = step(tid, instruction, signals).and_then(|()| registers(tid));
    set_registers(tid, &before)?;
    match result?.rax {
        error if error > u64::MAX - 4096 => Err(io::Error::from_raw_os_error(error.wrapping_neg() as i32)),
        value => Ok(value),
    }
}

/// Executes the instruction at this address.
fn step(tid: i32, instruction: u64, signals: &mut Vec<i32>) -> io::Result<()> {
    loop {
        call(libc::PTRACE_SINGLESTEP, tid, 0, 0)?;
        let stop = wait_for(tid)?;
        if stop == Stop::Ended {
            return Err(io::ErrorKind::NotFound.into());
        }
        if registers(tid)?.rip != instruction {
            return Ok(());
        }
        if let Stop::Signal(signal) = stop {
            signals.push(signal);
        }
    }
}

/// The memory of another process.
pub(super) struct Memory(File);

impl Memory {
    /// Opens the memory of a process. Needs the permission to trace it.
    pub(super) fn of(pid: u32) -> io::Result<Memory> {
        File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).map(Memory)
    }

    /// Reads exactly these bytes.
    pub(super) fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(bytes, address)
    }

    /// Writes exactly these bytes, into read-only memory too.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, address)
    }
}
