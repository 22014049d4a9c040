//! Loads the library into another process by two calls that its threads make in passing: `dlopen`, and the function of
//! the library that begins the recording. A process that has the library from a former recording makes only the second.
//!
//! 1. [`Search`] stops a thread at a place where it may call `dlopen`.
//! 2. The call is prepared on the thread's stack ([`SignalFrame`]). One change of the registers begins it, and the
//!    thread is let go: it makes the call and goes on with the program, whatever happens to this process.
//! 3. The memory of the process shows what has become of it.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::arch::{self, Call, Interrupted, Registers};
use super::rehearsal::rehearse;
use super::request::{Request, Stopped, is_cancelled, not_loaded};
use super::safe_point::{SafePoint, Search};
use super::signal_frame::SignalFrame;
use super::traced_process::{LoadedLibrary, TracedProcess, not_permitted};
use super::tracee::{self, Memory};
use crate::proc::ProcessDir;

/// How long a call may take. It loads a library or starts a thread.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How often to look what has become of it.
const PAUSE: Duration = Duration::from_micros(200);
/// The value of the library's variable when its function may be called.
const READY: u64 = u64::from_le_bytes(*b"MEMTRACE");
/// The library's own functions come before those of the same names that the program has loaded.
const DLOPEN_FLAGS: i32 = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_DEEPBIND;

/// Loads the library and calls its function. `cancel` becomes readable if nobody waits for that any more.
pub(super) fn inject(process: &TracedProcess, request: Request<'_>, cancel: &impl AsFd) -> anyhow::Result<Stopped> {
    rehearse()?;
    let memory = Memory::of(process.pid).map_err(|_| not_permitted(process.pid))?;
    let mut injector =
        Injector { process, memory: &memory, search: Search::new(process, &memory), loading: Duration::ZERO };
    let library = match injector.loaded_library()? {
        Some(library) => library,
        None => injector.load(request.library, cancel)?,
    };
    let result = injector.attach(library, request.options, cancel)?;
    Ok(Stopped {
        stopped_ns: Some(injector.search.stopped.as_nanos() as u64),
        loading_ns: injector.loading.as_nanos() as u64,
        result,
    })
}

struct Injector<'a> {
    process: &'a TracedProcess,
    memory: &'a Memory,
    search: Search<'a>,
    /// How long threads have made calls of ours.
    loading: Duration,
}

/// A call that a thread makes.
struct Begun {
    since: Instant,
    frame: SignalFrame,
}

impl Injector<'_> {
    /// Where the process has the library, if its function may be called. The loader maps the parts of the library one
    /// after the other, so its variable may not be there yet.
    fn loaded_library(&self) -> anyhow::Result<Option<LoadedLibrary>> {
        let Some(library) = self.process.loaded_library(self.memory) else { return Ok(None) };
        let mut ready = [0; 8];
        let is_mapped = self.read_mapped(library.ready, &mut ready)?;
        Ok((is_mapped && u64::from_ne_bytes(ready) == READY).then_some(library))
    }

    /// Reads these bytes. `false` if they are not mapped.
    fn read_mapped(&self, address: u64, bytes: &mut [u8]) -> anyhow::Result<bool> {
        match self.memory.read(address, bytes) {
            Ok(()) => Ok(true),
            Err(_) if ProcessDir::of(self.process.pid).exists() => Ok(false),
            Err(error) => Err(error).context("the process has ended"),
        }
    }

    /// Loads the library.
    fn load(&mut self, path: &[u8], cancel: &impl AsFd) -> anyhow::Result<LoadedLibrary> {
        let call = Call { function: self.process.dlopen, text: path, number: DLOPEN_FLAGS as u64 };
        let begun = self.begin(&call, cancel)?;
        loop {
            // Read before the library's state: a call that is over has loaded it, or will not.
            let is_over = self.is_over(&begun)?;
            if let Some(library) = self.loaded_library()? {
                self.loading += begun.since.elapsed();
                return Ok(library);
            }
            if is_over {
                return Err(not_loaded(self.process.pid, "dlopen has failed there"));
            }
            self.wait(&begun, cancel)?;
        }
    }

    /// Calls the library's function. Returns its result.
    fn attach(&mut self, library: LoadedLibrary, options: &[u8], cancel: &impl AsFd) -> anyhow::Result<i32> {
        // Different from that of any call before.
        let before = self.memory.word(library.answer).context("the process has ended")? >> 32;
        let number = (before as u32).wrapping_add(1).max(1);
        let call = Call { function: library.attach, text: options, number: number.into() };
        let begun = self.begin(&call, cancel)?;
        loop {
            let answer = self.memory.word(library.answer).context("the process has ended")?;
            if answer >> 32 == u64::from(number) {
                self.loading += begun.since.elapsed();
                return Ok(answer as i32);
            }
            self.wait(&begun, cancel)?;
        }
    }

    /// Lets a thread make a call.
    fn begin(&mut self, call: &Call<'_>, cancel: &impl AsFd) -> anyhow::Result<Begun> {
        loop {
            let SafePoint { tid, registers, since } = self.search.find(cancel)?;
            let begun = self.begin_on(tid, registers, call);
            tracee::detach(tid, 0);
            self.search.stopped += since.elapsed();
            if let Some(frame) = begun {
                return Ok(Begun { since, frame });
            }
        }
    }

    /// Makes a stopped thread begin the call when it goes on. Nothing has changed if the result is `None`.
    fn begin_on(&self, tid: i32, registers: Registers, call: &Call<'_>) -> Option<SignalFrame> {
        let thread = Interrupted {
            registers,
            signal_mask: tracee::signal_mask(tid).ok()?,
            extended_state: arch::extended_state(tid).ok()?,
        };
        let frame = SignalFrame::new(&thread, call, self.process.return_from_signal)?;
        if !self.search.has_stack_at(frame.address()) {
            return None;
        }
        // The program does not use the memory below its stack pointer and the red zone.
        self.memory.write(frame.address(), frame.bytes()).ok()?;
        tracee::set_registers(tid, frame.registers()).ok()?;
        Some(frame)
    }

    /// Whether a call is over: the thread uses the part of its stack that the call keeps.
    fn is_over(&self, begun: &Begun) -> anyhow::Result<bool> {
        let (address, kept) = begun.frame.unchanged_part();
        let mut now = vec![0; kept.len()];
        // The stack of a thread that has ended is not mapped.
        Ok(!self.read_mapped(address, &mut now)? || now != kept)
    }

    fn wait(&mut self, begun: &Begun, cancel: &impl AsFd) -> anyhow::Result<()> {
        if is_cancelled(cancel) {
            bail!("interrupted");
        }
        if begun.since.elapsed() > CALL_TIMEOUT {
            let seconds = CALL_TIMEOUT.as_secs();
            return Err(not_loaded(self.process.pid, &format!("that has not ended within {seconds} s")));
        }
        tracee::pause(PAUSE);
        self.search.let_go();
        Ok(())
    }
}
