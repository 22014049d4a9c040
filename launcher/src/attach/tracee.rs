//! The threads of another process, as its tracer sees them (ptrace(2)).
//!
//! Every function concerns a thread that this process has seized. Children and new threads are not traced, and the end
//! of the tracer ends no traced process (`PTRACE_O_EXITKILL` is not set): its threads run on as if nobody had traced
//! them.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use super::arch::{NT_PRSTATUS, Registers};

/// `PTRACE_GETSIGMASK` of linux/ptrace.h.
const GET_SIGNAL_MASK: libc::c_uint = 0x420a;

/// Why a thread has stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stop {
    /// It is about to get this signal.
    Signal(i32),
    /// It begins or ends a system call.
    Call,
    /// The tracer has interrupted it.
    Interrupted,
    /// A signal has stopped the whole process.
    Group,
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
            libc::PTRACE_EVENT_STOP if signal == libc::SIGTRAP => Stop::Interrupted,
            libc::PTRACE_EVENT_STOP => Stop::Group,
            _ if signal == libc::SIGTRAP | 0x80 => Stop::Call,
            _ => Stop::Signal(signal),
        }
    }
}

fn call(request: libc::c_uint, tid: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the requests used here read or write only the traced process, or the memory that `data` points to, which
    // callers provide in the size that the request needs.
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Begins to trace a thread without stopping it.
pub(super) fn seize(tid: i32) -> io::Result<()> {
    call(libc::PTRACE_SEIZE, tid, 0, libc::PTRACE_O_TRACESYSGOOD as usize)
}

/// Stops a thread. [`stop_of`] reports when it has stopped.
pub(super) fn interrupt(tid: i32) -> io::Result<()> {
    call(libc::PTRACE_INTERRUPT, tid, 0, 0)
}

/// Continues a stopped thread until it begins or ends a system call. It gets `signal` (0 for none).
pub(super) fn resume(tid: i32, signal: i32) {
    let _ = call(libc::PTRACE_SYSCALL, tid, 0, signal as usize);
}

/// Ends tracing a stopped thread, which continues and gets `signal` (0 for none).
pub(super) fn detach(tid: i32, signal: i32) {
    let _ = call(libc::PTRACE_DETACH, tid, 0, signal as usize);
}

/// Sets the general registers of a stopped thread.
pub(super) fn set_registers(tid: i32, mut registers: Registers) -> io::Result<()> {
    let bytes = registers.bytes_mut();
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    call(libc::PTRACE_SETREGSET, tid, NT_PRSTATUS, (&raw mut part).addr())
}

/// The blocked signals of a stopped thread.
pub(super) fn signal_mask(tid: i32) -> io::Result<u64> {
    let mut mask = 0u64;
    call(GET_SIGNAL_MASK, tid, size_of::<u64>(), (&raw mut mask).addr())?;
    Ok(mask)
}

/// How a thread has stopped. `None` if it has not.
pub(super) fn stop_of(tid: i32) -> io::Result<Option<Stop>> {
    let mut status = 0;
    // SAFETY: `status` is writable.
    match unsafe { libc::waitpid(tid, &mut status, libc::__WALL | libc::WNOHANG) } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        _ => Ok(Some(Stop::of(status))),
    }
}

/// Waits until a thread stops. The error is `TimedOut` if that takes longer than `limit`: a thread in the kernel stops
/// late.
pub(super) fn wait_for(tid: i32, limit: Duration) -> io::Result<Stop> {
    let began = Instant::now();
    loop {
        if let Some(stop) = stop_of(tid)? {
            return Ok(stop);
        }
        let left = limit.saturating_sub(began.elapsed());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // The signal is lost if this process has inherited that it is ignored.
        pause(left.min(Duration::from_millis(1)));
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

    /// Reads as many bytes as are mapped from this address on. Returns their number.
    pub(super) fn read_some(&self, address: u64, bytes: &mut [u8]) -> usize {
        self.0.read_at(bytes, address).unwrap_or(0)
    }

    /// The 8-byte word at this address.
    pub(super) fn word(&self, address: u64) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes).map(|()| u64::from_ne_bytes(bytes))
    }

    /// Writes exactly these bytes.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, address)
    }
}
