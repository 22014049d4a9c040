//! Finds a thread of another process at a place where it may call `dlopen`.
//!
//! That is any instruction of the interpreter's loop (`_PyEval_EvalFrameDefault`): the thread is inside no function of
//! the C library, so it has no lock that loading a library needs, and Python code may import a library there as well.
//! No signal handler runs this function. Any other place is safe if the whole stack is known and has no such function
//! ([`Stacks`]). Most samples of an interpreter without a loop (`Py_TAIL_CALL_INTERP`) are of that kind.
//!
//! Nothing of the process is changed for this, so nothing is left behind in a forked child or by the end of this
//! process. Threads that run Python are watched: they stop when they begin and end a system call, and for some
//! microseconds in between, to look at their registers. A thread that waits in a system call is let alone as long as
//! others run. One that cannot be stopped, because it waits for a child (`vfork`), holds up nothing: it is let go when
//! it stops.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use anyhow::bail;

use super::arch::{self, Registers};
use super::loaded_file::{Mapping, mappings};
use super::request::is_cancelled;
use super::safe_stack::Stacks;
use super::traced_process::{TracedProcess, not_permitted};
use super::tracee::{self, Memory, Stop};
use crate::message::WithHelp;

/// How long to wait for a thread at such a place.
const LIMIT: Duration = Duration::from_secs(10);
/// From when on threads are watched that wait in a system call. Most programs have run Python before.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often to look whether a thread runs, or has stopped.
const PAUSE: Duration = Duration::from_micros(200);
/// How long a watched thread runs, at first after a system call and at most. The times differ, so that they do not
/// follow the rhythm of the program.
const FIRST_SLICE: Duration = Duration::from_micros(10);
const LONGEST_SLICE: Duration = Duration::from_millis(1);
/// How long it runs at most if that has led to nothing for [`HURRY_AFTER`].
const HURRIED_SLICE: Duration = Duration::from_micros(150);
const HURRY_AFTER: Duration = Duration::from_secs(1);
/// Up to this length, the end of a slice is waited for actively: a sleep would take longer.
const ACTIVE_SLICE: Duration = Duration::from_micros(60);
/// How often to look which threads there are, and which of them run Python.
const LISTING_INTERVAL: Duration = Duration::from_millis(100);
/// The stack that a call may need, in bytes.
const CALL_STACK: u64 = 64 << 10;
/// How much of a thread's stack to search for frames of the interpreter, in bytes.
const SEARCHED_STACK: usize = 128 << 10;

/// A thread that has stopped at such a place.
pub(super) struct SafePoint {
    pub(super) tid: i32,
    pub(super) registers: Registers,
    /// Since when it is known to be stopped.
    pub(super) since: Instant,
}

/// A thread that is traced and has not stopped.
struct Watched {
    state: State,
    /// How long it runs before the next sample.
    slice: Duration,
    /// Its instruction and stack pointers at the last sample.
    last: (u64, u64),
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// It runs. It is looked at from then on.
    Runs(Instant),
    /// It is to stop.
    IsInterrupted,
    /// It is in a system call, and stops at its end.
    InCall,
}

/// Looks for threads at such a place.
pub(super) struct Search<'a> {
    process: &'a TracedProcess,
    memory: &'a Memory,
    /// The threads that may run Python, and are not watched.
    candidates: BTreeSet<i32>,
    watched: BTreeMap<i32, Watched>,
    stacks: Stacks,
    /// The mappings of the process that may be stacks.
    mappings: Vec<Mapping>,
    longest_slice: Duration,
    random: u64,
    /// How long threads were stopped, together.
    pub(super) stopped: Duration,
}

impl<'a> Search<'a> {
    pub(super) fn new(process: &'a TracedProcess, memory: &'a Memory) -> Search<'a> {
        let mappings = mappings(process.pid).unwrap_or_default();
        Search {
            process,
            memory,
            stacks: Stacks::read(process.pid, &mappings, memory, process.library.as_os_str().as_bytes()),
            candidates: BTreeSet::new(),
            watched: BTreeMap::new(),
            mappings: Vec::new(),
            longest_slice: LONGEST_SLICE,
            random: u64::from(process.pid) << 32 | 0x4f6c_dd1d,
            stopped: Duration::ZERO,
        }
    }

    /// Waits until a thread is at such a place, and leaves it stopped there.
    pub(super) fn find(&mut self, cancel: &impl AsFd) -> anyhow::Result<SafePoint> {
        let began = Instant::now();
        let (mut next_listing, mut next_sample) = (began, began);
        loop {
            let now = Instant::now();
            if now >= next_listing {
                self.list_threads()?;
                next_listing = now + LISTING_INTERVAL;
            }
            if let Some(found) = self.sample(true) {
                return Ok(found);
            }
            if now >= next_sample {
                self.watch_more(now > began + PATIENCE)?;
                self.longest_slice = if now > began + HURRY_AFTER { HURRIED_SLICE } else { LONGEST_SLICE };
                next_sample = now + PAUSE;
                if is_cancelled(cancel) {
                    bail!("interrupted");
                }
                if now > began + LIMIT {
                    bail!(self.not_found());
                }
            }
            self.pause();
        }
    }

    fn not_found(&self) -> WithHelp {
        let seconds = LIMIT.as_secs();
        let (why, fix) = if self.process.loader_locks.is_taken(self.memory) {
            (format!("it has been loading libraries for {seconds} s"), "attach when it has loaded them")
        } else {
            (format!("it has not run Python for {seconds} s"), "attach when it runs Python again")
        };
        WithHelp::new(format!("cannot attach to process {}: {why}", self.process.pid), fix)
    }

    /// Lets the threads go that have stopped.
    pub(super) fn let_go(&mut self) {
        self.sample(false);
    }

    /// Determines the threads that may run Python.
    fn list_threads(&mut self) -> anyhow::Result<()> {
        let pid = self.process.pid;
        let threads = threads(pid);
        if threads.is_empty() {
            bail!(WithHelp::new(format!("process {pid} has ended"), "nvidia-smi lists the processes that use a GPU"));
        }
        let may_run = |tid: &i32| {
            !self.watched.contains_key(tid) && waiting_stack(pid, *tid).is_none_or(|stack| self.has_frame(stack))
        };
        self.candidates = threads.into_iter().filter(may_run).collect();
        let mut mappings = mappings(pid).unwrap_or_default();
        mappings.retain(|mapping| mapping.is_writable);
        self.mappings = mappings;
        Ok(())
    }

    /// Whether the stack from this address on may have a frame of the interpreter. Optimized builds inline the function
    /// that begins it into others, so any return address in the interpreter's file counts.
    fn has_frame(&self, stack_pointer: u64) -> bool {
        let mut bytes = vec![0; SEARCHED_STACK];
        let length = self.memory.read_some(stack_pointer & !7, &mut bytes);
        let words = bytes.get(..length).unwrap_or_default().chunks_exact(8);
        let mut addresses = words.filter_map(|word| word.try_into().ok().map(u64::from_ne_bytes));
        addresses.any(|address| self.process.interpreter_code.iter().any(|code| code.contains(&address)))
    }

    /// Whether a thread whose stack pointer is here has enough stack left for a call.
    pub(super) fn has_stack_at(&self, stack_pointer: u64) -> bool {
        let Some(stack) = self.mappings.iter().find(|stack| (stack.start..stack.end).contains(&stack_pointer)) else {
            return false;
        };
        // The kernel extends the stack of the main thread up to a limit.
        let limit = || self.process.stack_limit.map_or(0, |limit| stack.end.saturating_sub(limit));
        let end = if stack.path == b"[stack]" { limit() } else { stack.start };
        stack_pointer.saturating_sub(CALL_STACK) >= end
    }

    /// Watches the candidates that run, and those that wait in a system call if `with_waiting`.
    fn watch_more(&mut self, with_waiting: bool) -> anyhow::Result<()> {
        let pid = self.process.pid;
        for tid in self.candidates.clone() {
            match state_of(pid, tid) {
                Some(b'R') => {}
                Some(b'S') if with_waiting && !is_in_call_not_repeated(pid, tid) => {}
                _ => continue,
            }
            self.candidates.remove(&tid);
            match tracee::seize(tid).and_then(|()| tracee::interrupt(tid)) {
                Ok(()) => {
                    let state = State::IsInterrupted;
                    self.watched.insert(tid, Watched { state, slice: FIRST_SLICE, last: (0, 0) });
                }
                // It ends, or has ended.
                Err(_) if !matches!(state_of(pid, tid), Some(b'R' | b'S')) => {}
                Err(_) => return Err(not_permitted(pid)),
            }
        }
        Ok(())
    }

    /// Looks at the watched threads that have stopped, and lets them run on. With `is_searching`, one that is at such a
    /// place stays stopped and is the result. Else they are not watched any more.
    fn sample(&mut self, is_searching: bool) -> Option<SafePoint> {
        for tid in self.watched.keys().copied().collect::<Vec<_>>() {
            let Ok(stop) = tracee::stop_of(tid) else {
                self.watched.remove(&tid);
                continue;
            };
            let Some(stop) = stop else { continue };
            let since = Instant::now();
            let found = self.handle(tid, stop, is_searching);
            if let Some(registers) = found {
                self.watched.remove(&tid);
                return Some(SafePoint { tid, registers, since });
            }
            self.stopped += since.elapsed();
        }
        let now = Instant::now();
        for (tid, watched) in &mut self.watched {
            if matches!(watched.state, State::Runs(until) if until <= now) {
                watched.state = State::IsInterrupted;
                let _ = tracee::interrupt(*tid);
            }
        }
        None
    }

    /// Lets a stopped thread run on, unless it is at such a place. Then the result has its registers.
    fn handle(&mut self, tid: i32, stop: Stop, is_searching: bool) -> Option<Registers> {
        let watched = self.watched.get_mut(&tid)?;
        match stop {
            Stop::Signal(signal) => {
                tracee::resume(tid, signal);
                return None;
            }
            Stop::Call if is_searching && watched.state != State::InCall => {
                watched.state = State::InCall;
                tracee::resume(tid, 0);
                return None;
            }
            Stop::Ended => {
                self.watched.remove(&tid);
                return None;
            }
            Stop::Call | Stop::Interrupted | Stop::Group => {}
        }
        let registers = Registers::read(tid).ok();
        let is_first = watched.last == (0, 0);
        let registers = registers.filter(|_| is_searching && stop != Stop::Group);
        let registers = registers.filter(|registers| !is_first || self.has_frame(registers.stack_pointer()));
        let Some(registers) = registers else {
            self.release(tid);
            return None;
        };
        let is_shown = arch::SHOWS_REGISTERS_AT_CALLS || stop != Stop::Call;
        if is_shown && self.is_safe(&registers) {
            return Some(registers);
        }
        repeat_interrupted_call(tid, &registers);
        let random = self.random();
        let watched = self.watched.get_mut(&tid)?;
        let here = (registers.instruction(), registers.stack_pointer());
        // A thread that has not run, for want of a processor, gets more time.
        let is_stuck = stop == Stop::Interrupted && watched.last == here;
        watched.slice = match stop {
            Stop::Call => FIRST_SLICE,
            _ => (watched.slice * if is_stuck { 4 } else { 1 } * 5 / 4).min(self.longest_slice),
        };
        watched.last = here;
        let slice = watched.slice.mul_f64(0.25 + (random % 1024) as f64 / 512.0);
        watched.state = State::Runs(Instant::now() + slice);
        tracee::resume(tid, 0);
        None
    }

    /// Ends the tracing of a stopped thread.
    fn release(&mut self, tid: i32) {
        if let Ok(registers) = Registers::read(tid) {
            repeat_interrupted_call(tid, &registers);
        }
        tracee::detach(tid, 0);
        self.watched.remove(&tid);
    }

    fn is_safe(&self, registers: &Registers) -> bool {
        registers.is_between_instructions(|at| self.memory.word(at).ok())
            && self.has_stack_at(registers.stack_pointer())
            && !self.process.loader_locks.is_taken(self.memory)
            && (self.process.interpreter_loop.contains(&registers.instruction())
                || self.stacks.is_safe(self.memory, registers))
    }

    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Waits for the next sample.
    fn pause(&self) {
        let now = Instant::now();
        let next = self.watched.values().filter_map(|watched| match watched.state {
            State::Runs(until) => Some(until.saturating_duration_since(now)),
            State::IsInterrupted | State::InCall => None,
        });
        let next = next.min().unwrap_or(PAUSE).min(PAUSE);
        if next <= ACTIVE_SLICE {
            std::hint::spin_loop();
        } else {
            tracee::pause(next);
        }
    }
}

/// Repeats a system call that has ended because of the interruption. The kernel does so itself for most, but not for
/// these.
fn repeat_interrupted_call(tid: i32, registers: &Registers) {
    if let Some(repeating) = registers.repeating_call() {
        let _ = tracee::set_registers(tid, repeating);
    }
}

/// The ids of all threads of a process.
fn threads(pid: u32) -> Vec<i32> {
    let folders = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    folders.filter_map(|folder| folder.file_name().to_str()?.parse().ok()).collect()
}

/// Whether a thread waits in a system call that an interruption would end with an error, because neither the kernel nor
/// this process can repeat it.
fn is_in_call_not_repeated(pid: u32, tid: i32) -> bool {
    let call = || std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")).ok();
    let number = || call()?.split_whitespace().next()?.parse().ok();
    !arch::REPEATS_CALLS && number().is_some_and(|number: libc::c_long| arch::NOT_REPEATED.contains(&number))
}

/// The stack pointer of a thread that waits in a system call. `None` if it runs, or if the kernel does not show it.
fn waiting_stack(pid: u32, tid: i32) -> Option<u64> {
    let call = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")).ok()?;
    u64::from_str_radix(call.split_whitespace().rev().nth(1)?.strip_prefix("0x")?, 16).ok()
}

/// The letter of a thread's state: `R` if it runs or could if a processor were free, `S` if it waits. `None` if it is
/// gone.
fn state_of(pid: u32, tid: i32) -> Option<u8> {
    let stat = std::fs::read(format!("/proc/{pid}/task/{tid}/stat")).ok()?;
    // The name may contain any character. The state follows the last parenthesis.
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(end + 2).copied()
}
