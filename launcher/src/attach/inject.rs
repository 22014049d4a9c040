//! The injector: a process that loads our library into the traced one.
//!
//! It is a process of its own, in a session of its own, so that the end of the launcher does not end it: a breakpoint that
//! nobody removes would end the traced process. It ends as soon as the traced process goes on without it.
//!
//! 1. It seizes all threads of the process, which stops none, and writes `int3` at the beginning of functions that a
//!    thread calls only with the GIL and without a lock of the C library.
//! 2. When a thread executes one, it restores the functions and lets all other threads go.
//! 3. That thread makes a mapping. The injector writes code into it ([`super::trampoline`]), where the thread goes on, and
//!    lets it go too.
//! 4. When the code has run, the thread is stopped once more to remove the mapping.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use super::traced_process::{TracedProcess, not_permitted};
use super::tracee::{self, Memory, Registers, Stop};
use super::trampoline::{self, Data};
use crate::message::WithHelp;

/// How long to wait for a thread that calls one of the functions.
const SAFE_POINT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the code may take. It loads a library and starts a thread.
const CODE_TIMEOUT: Duration = Duration::from_secs(30);
/// The `int3` instruction.
const BREAKPOINT: u8 = 0xcc;

/// How long the process was stopped.
#[derive(Serialize, Deserialize, Clone, Copy, Debug)]
pub(crate) struct Stopped {
    /// From the stop of the first thread until the last other one went on, in nanoseconds. `None` if Python itself has
    /// loaded the library, for which no thread is stopped.
    pub(crate) others_ns: Option<u64>,
    /// How long the thread that has loaded the library did not go on with the program, in nanoseconds.
    pub(crate) loading_ns: u64,
    /// The result of the library's function.
    pub(crate) result: i32,
}

/// The strings of the call: the library's path, the function's name and its argument.
pub(super) type Strings<'a> = [&'a [u8]; 3];

/// Loads the library and calls its function. `cancel` becomes readable if nobody waits for that any more.
pub(super) fn inject(process: &TracedProcess, strings: Strings<'_>, cancel: &impl AsFd) -> anyhow::Result<Stopped> {
    let memory = Memory::of(process.pid).map_err(|_| not_permitted(process.pid))?;
    let mut session = Session { process, memory: &memory, threads: BTreeSet::new(), original: Vec::new() };
    let found = session.seize_all().and_then(|()| session.wait_for_safe_point(cancel));
    let (tid, began) = match found {
        Ok(found) => found,
        Err(error) => {
            session.restore();
            session.release(None);
            return Err(error);
        }
    };
    session.restore();
    session.release(Some(tid));
    let others_ns = began.elapsed().as_nanos() as u64;
    let mut signals = Vec::new();
    let started = start_code(process, &memory, tid, strings, &mut signals);
    tracee::detach(tid, 0);
    send(process.pid, tid, &mut signals);
    let code = started?;
    let data = wait_for_code(&memory, &code)?;
    let loading_ns = began.elapsed().as_nanos() as u64;
    remove(process, tid, &code);
    if data.handle == 0 {
        let text: Vec<u8> = data.error.into_iter().take_while(|byte| *byte != 0).collect();
        return Err(not_loaded(process.pid, &String::from_utf8_lossy(&text)));
    }
    Ok(Stopped { others_ns: Some(others_ns), loading_ns, result: data.result as i32 })
}

/// The error for a library that the process cannot load.
pub(super) fn not_loaded(pid: u32, why: &str) -> anyhow::Error {
    anyhow!(WithHelp::new(
        format!("cannot load the library into process {pid}: {why}"),
        "start the program with: memtrace -- COMMAND"
    ))
}

/// Sends signals that a thread has not received because of the injection.
fn send(pid: u32, tid: i32, signals: &mut Vec<i32>) {
    for signal in signals.drain(..) {
        // SAFETY: takes only plain values.
        unsafe { libc::syscall(libc::SYS_tgkill, pid as libc::pid_t, tid, signal) };
    }
}

/// The threads that are traced, and what the functions contained.
struct Session<'a> {
    process: &'a TracedProcess,
    memory: &'a Memory,
    threads: BTreeSet<i32>,
    original: Vec<(u64, u8)>,
}

impl Session<'_> {
    /// Seizes all threads, also those that start meanwhile.
    fn seize_all(&mut self) -> anyhow::Result<()> {
        loop {
            let new: Vec<i32> =
                threads(self.process.pid).into_iter().filter(|tid| !self.threads.contains(tid)).collect();
            if new.is_empty() {
                return Ok(());
            }
            for tid in new {
                match tracee::seize(tid) {
                    Ok(()) => drop(self.threads.insert(tid)),
                    // It has ended, or its parent was traced already and so is it.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => drop(self.threads.insert(tid)),
                    Err(_) if is_traced_by_us(self.process.pid, tid) => drop(self.threads.insert(tid)),
                    Err(_) => return Err(not_permitted(self.process.pid)),
                }
            }
        }
    }

    /// Writes the breakpoints and waits until a thread executes one. Returns that thread, stopped at the beginning of the
    /// function, and when it was seen.
    fn wait_for_safe_point(&mut self, cancel: &impl AsFd) -> anyhow::Result<(i32, Instant)> {
        for address in &self.process.safe_points {
            let mut byte = [0];
            self.memory.read(*address, &mut byte).context("cannot read the memory of the process")?;
            self.original.push((*address, byte[0]));
            self.memory.write(*address, &[BREAKPOINT]).context("cannot write to the memory of the process")?;
        }
        let began = Instant::now();
        loop {
            match tracee::next_stop() {
                Ok(Some((tid, stop))) => {
                    self.threads.insert(tid);
                    let now = Instant::now();
                    if self.is_at_breakpoint(tid, stop) {
                        return Ok((tid, now));
                    }
                    let_go_on(tid, stop);
                    continue;
                }
                Ok(None) => {}
                Err(_) => bail!(WithHelp::new(
                    format!("process {} has ended", self.process.pid),
                    "nvidia-smi lists the processes that use a GPU"
                )),
            }
            if is_cancelled(cancel) {
                bail!("interrupted");
            }
            if began.elapsed() > SAFE_POINT_TIMEOUT {
                let seconds = SAFE_POINT_TIMEOUT.as_secs();
                bail!(WithHelp::new(
                    format!("cannot attach to process {}: it has not run Python for {seconds} s", self.process.pid),
                    "attach when it runs Python again"
                ));
            }
            tracee::pause(Duration::from_millis(20));
        }
    }

    /// Whether a thread has stopped at a breakpoint. Its registers are set back to the beginning of the function.
    fn is_at_breakpoint(&self, tid: i32, stop: Stop) -> bool {
        if stop != Stop::Signal(libc::SIGTRAP) || !tracee::is_breakpoint(tid) {
            return false;
        }
        let Ok(registers) = tracee::registers(tid) else { return false };
        let address = registers.rip.wrapping_sub(1);
        self.original.iter().any(|(known, _)| *known == address)
            && tracee::set_registers(tid, &Registers { rip: address, ..registers }).is_ok()
    }

    /// Restores the functions.
    fn restore(&mut self) {
        for (address, byte) in &self.original {
            // The page was writable a moment ago, so this fails only if the process has ended.
            let _ = self.memory.write(*address, &[*byte]);
        }
    }

    /// Lets all threads go on, except `keep`, which is stopped. The functions must be restored.
    fn release(&mut self, keep: Option<i32>) {
        loop {
            let traced: Vec<i32> = threads(self.process.pid)
                .into_iter()
                .filter(|tid| Some(*tid) != keep && is_traced_by_us(self.process.pid, *tid))
                .collect();
            if traced.is_empty() {
                return;
            }
            for tid in &traced {
                let _ = tracee::interrupt(*tid);
            }
            for tid in traced {
                let Ok(stop) = tracee::wait_for(tid) else { continue };
                let signal = match stop {
                    Stop::Signal(_) if self.is_at_breakpoint(tid, stop) => 0,
                    Stop::Signal(signal) => signal,
                    _ => 0,
                };
                tracee::detach(tid, signal);
            }
        }
    }
}

/// Continues a thread as if nobody traced it.
fn let_go_on(tid: i32, stop: Stop) {
    match stop {
        Stop::Signal(signal) => tracee::resume(tid, signal),
        Stop::Group(_) => tracee::listen(tid),
        Stop::Cloned | Stop::Interrupted => tracee::resume(tid, 0),
        Stop::Ended => {}
    }
}

/// The ids of all threads of a process.
fn threads(pid: u32) -> Vec<i32> {
    let folders = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    folders.filter_map(|folder| folder.file_name().to_str()?.parse().ok()).collect()
}

fn is_traced_by_us(pid: u32, tid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).unwrap_or_default();
    let field = |name: &str| status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
    let has_ended = field("State:").is_none_or(|state| state.starts_with(['Z', 'X']));
    !has_ended && field("TracerPid:") == Some(std::process::id().to_string())
}

pub(super) fn is_cancelled(cancel: &impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(cancel, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// The code in the traced process.
struct Code {
    base: u64,
    size: u64,
    data: u64,
}

/// Writes the code and sets the stopped thread to its beginning.
fn start_code(
    process: &TracedProcess,
    memory: &Memory,
    tid: i32,
    strings: Strings<'_>,
    signals: &mut Vec<i32>,
) -> anyhow::Result<Code> {
    let cannot = "cannot write code into the process";
    let length = strings.iter().map(|text| text.len() + 1).sum();
    let size = trampoline::size_of_image(length).ok_or_else(|| anyhow!("this processor has no XSAVE"))?;
    let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let arguments = [0, size, protection as u64, flags as u64, u64::MAX, 0];
    let base = tracee::system_call(tid, process.syscall, libc::SYS_mmap, arguments, signals).context(cannot)?;
    let registers = tracee::registers(tid).context(cannot)?;
    let data = Data {
        resume_at: registers.rip,
        dlopen: process.dlopen,
        dlsym: process.dlsym,
        dlerror: process.dlerror,
        errno_location: process.errno_location,
        ..Data::EMPTY
    };
    let image = trampoline::image(base, data, strings).context(cannot)?;
    memory.write(base, &image.bytes).context(cannot)?;
    tracee::set_registers(tid, &Registers { rip: base, ..registers }).context(cannot)?;
    Ok(Code { base, size, data: base + image.data_at })
}

/// Waits until the thread has left the code.
fn wait_for_code(memory: &Memory, code: &Code) -> anyhow::Result<Data> {
    let began = Instant::now();
    loop {
        let mut bytes = [0; size_of::<Data>()];
        memory.read(code.data, &mut bytes).context("the process has ended")?;
        let data = Data::from_bytes(bytes);
        if data.is_done != 0 {
            return Ok(data);
        }
        if began.elapsed() > CODE_TIMEOUT {
            bail!("the process does not load the library");
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Removes the mapping of the code, unless the thread has ended or is still at its last instruction.
fn remove(process: &TracedProcess, tid: i32, code: &Code) {
    let stop = || -> io::Result<()> {
        tracee::seize(tid)?;
        tracee::interrupt(tid)?;
        let mut signals = Vec::new();
        let stop = tracee::wait_for(tid)?;
        let signal = if let Stop::Signal(signal) = stop { signal } else { 0 };
        let is_outside =
            tracee::registers(tid).is_ok_and(|registers| !(code.base..code.base + code.size).contains(&registers.rip));
        if is_outside {
            let arguments = [code.base, code.size, 0, 0, 0, 0];
            let _ = tracee::system_call(tid, process.syscall, libc::SYS_munmap, arguments, &mut signals);
        }
        tracee::detach(tid, signal);
        send(process.pid, tid, &mut signals);
        Ok(())
    };
    // A thread that has ended leaves a page, which harms nobody.
    let _ = stop();
}
