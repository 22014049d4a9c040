//! Rehearses a call in passing ([`SignalFrame`]) on a child of this process.
//!
//! A kernel that restored less than expected, of a new processor or in a sandbox, would damage the traced process. So
//! the injector first makes a child of its own call a function, and compares its registers, its signal mask and its
//! alternate signal stack before and after.

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

use super::arch::{self, Call, Interrupted, Registers};
use super::loaded_file::{find_signal_return, mappings};
use super::signal_frame::SignalFrame;
use super::tracee::{self, Memory, Stop};
use crate::message::WithHelp;

/// How long it may take.
const LIMIT: Duration = Duration::from_secs(5);
const STOP_LIMIT: Duration = Duration::from_secs(1);
const TEXT: &[u8] = b"text";
const NUMBER: u64 = 0x1234_5678_9abc;

/// Memory that the child shares with this process.
struct Shared {
    is_spinning: AtomicU32,
    /// Set when the child shall compare its registers.
    is_over: AtomicU32,
    /// The number that the function got, plus the length of its text.
    called: AtomicU64,
    /// Whether SIGUSR1 was blocked in the function.
    was_blocked: AtomicU32,
}

/// For the function, which gets no pointer of ours.
static SHARED: AtomicPtr<Shared> = AtomicPtr::new(null_mut());

/// Whether a thread of this machine goes on unchanged after such a call. The error says what is wrong.
pub(super) fn rehearse() -> anyhow::Result<()> {
    let fails = |why: String| {
        anyhow!(WithHelp::new(
            format!("cannot attach: a call in a process of memtrace's own has failed ({why})"),
            "start the program with: memtrace -- COMMAND"
        ))
    };
    // SAFETY: a new mapping, whose zeros are valid for a structure of atomics.
    let shared = unsafe {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        let memory = libc::mmap(null_mut(), size_of::<Shared>(), protection, flags, -1, 0);
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("cannot map memory");
        }
        SHARED.store(memory.cast(), Ordering::Relaxed);
        &*memory.cast::<Shared>()
    };
    let parent = std::process::id();
    // SAFETY: `fork` accesses no memory of ours. The child calls no function that needs other threads.
    let child = unsafe { libc::fork() };
    match child {
        0 => {
            // SAFETY: takes plain values. The child must not spin without this process.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let is_orphan = std::os::unix::process::parent_id() != parent;
            let is_unchanged = !is_orphan && spin(shared);
            // SAFETY: takes an integer and does not return.
            unsafe { libc::_exit(i32::from(!is_unchanged)) }
        }
        child if child > 0 => {
            let result = call_in(child, shared);
            let status = if result.is_ok() { status_of(child) } else { None };
            // SAFETY: a child of ours that was not waited for, or whose id is not used again as long as it was not.
            unsafe {
                if status.is_none() {
                    libc::kill(child, libc::SIGKILL);
                    libc::waitpid(child, null_mut(), libc::__WALL);
                }
                libc::munmap(std::ptr::from_ref(shared).cast_mut().cast(), size_of::<Shared>());
            }
            result.map_err(&fails)?;
            if status == Some(0) { Ok(()) } else { Err(fails(format!("status {status:?}"))) }
        }
        _ => Err(io::Error::last_os_error()).context("cannot start a process"),
    }
}

/// Makes the child call [`called`], and lets it compare its registers.
fn call_in(child: i32, shared: &Shared) -> Result<(), String> {
    let began = Instant::now();
    let is_late = || began.elapsed() > LIMIT;
    let wait_until = |word: &dyn Fn() -> bool, what: &str| {
        while !word() {
            if is_late() {
                return Err(format!("{what} takes too long"));
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    };
    let of = |error: io::Error| error.to_string();
    wait_until(&|| shared.is_spinning.load(Ordering::Acquire) != 0, "its start")?;
    let mappings = mappings(std::process::id()).map_err(of)?;
    let c_library = mappings.iter().find(|one| one.file_name().starts_with(b"libc")).ok_or("no C library")?;
    let memory = Memory::of(child as u32).map_err(of)?;
    let return_from_signal = find_signal_return(&memory, &mappings, c_library).ok_or("no signal return")?;
    tracee::seize(child).map_err(of)?;
    let registers = loop {
        tracee::interrupt(child).map_err(of)?;
        let stop = tracee::wait_for(child, STOP_LIMIT).map_err(of)?;
        let registers = Registers::read(child).map_err(of)?;
        if stop == Stop::Interrupted && registers.is_between_instructions(|at| memory.word(at).ok()) {
            break registers;
        }
        if is_late() {
            return Err("it is not interrupted".to_owned());
        }
        tracee::resume(child, 0);
    };
    let thread = Interrupted {
        registers,
        signal_mask: tracee::signal_mask(child).map_err(of)?,
        extended_state: arch::extended_state(child).map_err(of)?,
    };
    let call = Call { function: called as *const () as u64, text: TEXT, number: NUMBER };
    let frame = SignalFrame::new(&thread, &call, return_from_signal).ok_or("its registers are not known")?;
    memory.write(frame.address(), frame.bytes()).map_err(of)?;
    tracee::set_registers(child, frame.registers()).map_err(of)?;
    tracee::detach(child, 0);
    wait_until(&|| shared.called.load(Ordering::Acquire) != 0, "the call")?;
    shared.is_over.store(1, Ordering::Release);
    let is_called = shared.called.load(Ordering::Acquire) == NUMBER + TEXT.len() as u64;
    let was_blocked = shared.was_blocked.load(Ordering::Acquire) != 0;
    if is_called && was_blocked { Ok(()) } else { Err(format!("called {is_called}, blocked {was_blocked}")) }
}

/// The exit status of the child. `None` if it does not end in time.
fn status_of(child: i32) -> Option<i32> {
    let began = Instant::now();
    let mut status = 0;
    // SAFETY: `status` is writable.
    while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG | libc::__WALL) } == 0 {
        if began.elapsed() > LIMIT {
            return None;
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    Some(status)
}

/// The function that the child calls. It changes what functions may change, and vector registers altogether.
unsafe extern "C" fn called(text: *const libc::c_char, number: u64) {
    // SAFETY: `rehearse` has set the pointer. The frame passes a C string.
    let (shared, length) = unsafe { (&*SHARED.load(Ordering::Relaxed), libc::strlen(text) as u64) };
    shared.was_blocked.store(blocked(libc::SIGUSR1).into(), Ordering::Release);
    arch::change_vector_registers();
    shared.called.store(number.wrapping_add(length), Ordering::Release);
}

/// Whether this thread blocks a signal.
fn blocked(signal: i32) -> bool {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the kernel writes the set, which is zeroed before.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, null(), set.as_mut_ptr());
        libc::sigismember(set.as_ptr(), signal) == 1
    }
}

/// The alternate signal stack of this thread.
fn signal_stack() -> (*mut c_void, usize, i32) {
    let mut stack = MaybeUninit::<libc::stack_t>::zeroed();
    // SAFETY: the kernel writes the structure, which is zeroed before.
    let stack = unsafe {
        libc::sigaltstack(null(), stack.as_mut_ptr());
        stack.assume_init()
    };
    (stack.ss_sp, stack.ss_size, stack.ss_flags)
}

/// Runs an endless loop until the call is over. Returns whether it has changed nothing.
fn spin(shared: &Shared) -> bool {
    let mut stack = [0u64; 4096];
    let alternate = libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: size_of_val(&stack) };
    // SAFETY: the memory lives until the child ends. The set is initialized before its use.
    unsafe {
        libc::sigaltstack(&alternate, null_mut());
        let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGUSR2);
        libc::pthread_sigmask(libc::SIG_SETMASK, set.as_ptr(), null_mut());
    }
    let stack_before = signal_stack();
    shared.is_spinning.store(1, Ordering::Release);
    // SAFETY: the word is shared with the other process, and lives until the child ends.
    let keeps_registers = unsafe { arch::keeps_registers_until(shared.is_over.as_ptr()) };
    keeps_registers && signal_stack() == stack_before && blocked(libc::SIGUSR2) && !blocked(libc::SIGUSR1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_goes_on_unchanged_after_a_call_in_passing() {
        for _ in 0..20 {
            rehearse().unwrap();
        }
    }
}
