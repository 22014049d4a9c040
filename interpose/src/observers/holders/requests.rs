//! Requests searches, and runs them between two Python instructions or before the interpreter ends.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use memtrace_trace::clock;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{NoticeStatus, ScanOccasion};
use memtrace_trace::options::Cpu;

use super::labels::Labels;
use super::paths::TensorReader;
use super::reported::{Reported, ScanFacts};
use super::search::search;
use crate::cpython::api::{self, CApi, METH_VARARGS, MethodDef, PyObjectPtr};
use crate::cpython::calls::new_none;
use crate::cpython::gil::GilToken;
use crate::observers::tensors::{TensorLayout, TorchSymbols};
use crate::recording::device_use;
use crate::recording::errno::RestoreErrno;
use crate::recording::guard::Guard;
use crate::recording::observer::Observer;
use crate::recording::process::Process;
use crate::recording::slot::Slot;
use crate::recording::watch::Cause;
use crate::torch::running_nodes;

const TOPIC: &str = "python.holders";
/// The optimizer step before which the first search runs. Each later one runs after half as many steps again.
const FIRST_STEP: u32 = 3;
/// A program without an optimizer is first searched after this many freed blocks, later after this many times as many.
const FIRST_FREES: u32 = 16;
const FREES_GROW: u32 = 8;
/// How many failed allocations are followed by a search each. After those, each search needs twice as many failures.
const ALL_FAILURES: u32 = 8;

/// Occasions as bits of a set.
const RUNNING: u8 = 1;
const OUT_OF_MEMORY: u8 = 2;

/// The part of holders in a recording.
pub(crate) const OBSERVER: Observer = Observer {
    start: Some(|options, watch| {
        if options.holders {
            // A path is valid for the memory that was at the address.
            watch.watch_frees();
        }
        HOLDERS.set(Holders::new(options.holders));
    }),
    // New frames come early and for as long as the program does something new.
    new_frame: Some(|_, _| with_holders(Holders::request_install)),
    watched: Some(|watch, cause| {
        with_holders(|holders| match cause {
            Cause::Frees => holders.blocks_freed(watch.frees()),
            Cause::OutOfMemory => holders.allocation_failed(),
            Cause::Backward | Cause::Counters => {}
        })
    }),
    optimizer_step: Some(|_, site| {
        if site.is_some() {
            with_holders(Holders::step_begins);
        }
    }),
    // Requests the search that waited for the end of a backward pass.
    no_node_runs: Some(|_| with_holders(|holders| holders.request(0))),
    ..Observer::NONE
};

static HOLDERS: Slot<Holders> = Slot::new();
/// Set once the function is registered with `atexit`, and while a thread registers it.
static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

static AT_EXIT: MethodDef = MethodDef {
    name: c"memtrace_holders".as_ptr(),
    body: at_exit,
    flags: METH_VARARGS,
    doc: c"Records what holds tensors (memtrace --holders).".as_ptr(),
};

fn with_holders(visit: impl FnOnce(&Holders)) {
    if let Some(holders) = HOLDERS.get().filter(|holders| holders.is_on.load(Ordering::Relaxed)) {
        visit(holders);
    }
}

/// The state of one recording.
struct Holders {
    /// Whether the options request this feature and it works.
    is_on: AtomicBool,
    /// Set while a pending call is queued in the interpreter.
    is_call_pending: AtomicBool,
    is_install_pending: AtomicBool,
    /// The occasions of the requested search.
    occasions: AtomicU8,
    steps: AtomicU32,
    next_step: AtomicU32,
    /// The number of freed blocks from which on the next search may run.
    next_frees: AtomicU32,
    failures: AtomicU32,
    is_searching: AtomicBool,
    state: UnsafeCell<State>,
}

/// The state that one search keeps for the next.
#[derive(Default)]
struct State {
    torch: Option<TorchSymbols>,
    layout: Option<TensorLayout>,
    reported: Reported,
}

// SAFETY: only the thread that has set `is_searching` uses `state`, and all other fields are atomic.
unsafe impl Sync for Holders {}
// SAFETY: `state` belongs to no thread. Whichever thread has set `is_searching` may use it.
unsafe impl Send for Holders {}

impl Holders {
    fn new(is_on: bool) -> Holders {
        Holders {
            is_on: AtomicBool::new(is_on),
            is_call_pending: AtomicBool::new(false),
            is_install_pending: AtomicBool::new(false),
            occasions: AtomicU8::new(0),
            steps: AtomicU32::new(0),
            next_step: AtomicU32::new(FIRST_STEP),
            next_frees: AtomicU32::new(FIRST_FREES),
            failures: AtomicU32::new(0),
            is_searching: AtomicBool::new(false),
            state: UnsafeCell::new(State::default()),
        }
    }

    /// Counts an optimizer step, and searches before some: ever fewer, so that the cost stays in proportion.
    fn step_begins(&self) {
        let step = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        if step >= self.next_step.load(Ordering::Relaxed) {
            self.next_step.store(step.saturating_add(step / 2).max(step + 1), Ordering::Relaxed);
            self.request(RUNNING);
        }
    }

    /// Searches after some numbers of freed blocks, which the scan for names chooses. It scans more often than a search
    /// may run.
    fn blocks_freed(&self, frees: u32) {
        if frees >= self.next_frees.load(Ordering::Relaxed) {
            self.next_frees.store(frees.saturating_mul(FREES_GROW), Ordering::Relaxed);
            self.request(RUNNING);
        }
    }

    fn allocation_failed(&self) {
        let failure = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        if failure <= ALL_FAILURES || failure.is_power_of_two() {
            self.request(OUT_OF_MEMORY);
        }
    }

    /// Queues a pending call, in which the interpreter calls [`run_search`].
    #[cold]
    fn request(&self, occasions: u8) {
        let requested = self.occasions.fetch_or(occasions, Ordering::AcqRel) | occasions;
        if requested == 0 || self.is_call_pending.swap(true, Ordering::AcqRel) {
            return;
        }
        let api = api::find().filter(|api| api.is_running());
        if !api.is_some_and(|api| api.queue_call(run_search)) {
            self.is_call_pending.store(false, Ordering::Release);
        }
    }

    /// Queues the registration with `atexit`.
    fn request_install(&self) {
        if IS_INSTALLED.load(Ordering::Acquire) || self.is_install_pending.swap(true, Ordering::AcqRel) {
            return;
        }
        let api = api::find().filter(|api| api.is_running());
        if !api.is_some_and(|api| api.queue_call(install)) {
            self.is_install_pending.store(false, Ordering::Release);
        }
    }

    fn switch_off(&self, reason: &str) {
        self.is_on.store(false, Ordering::Relaxed);
        if let Some(mut guard) = Guard::enter() {
            guard.notice(TOPIC, NoticeStatus::Off, &format!("what holds tensors is not recorded: {reason}"));
        }
    }

    /// Searches, unless another thread does. The caller holds the GIL.
    fn search(&self, process: &'static Process, api: &CApi, occasion: Option<ScanOccasion>) {
        if self.is_searching.swap(true, Ordering::Acquire) {
            return;
        }
        // A running backward pass may change gradients. The search is requested again once no node runs.
        if occasion.is_some() || !running_nodes::is_any() {
            let start = clock::monotonic_ns();
            let requested = self.occasions.swap(0, Ordering::AcqRel);
            let requested = match requested {
                0 => None,
                bits if bits & OUT_OF_MEMORY != 0 => Some(ScanOccasion::OutOfMemory),
                _ => Some(ScanOccasion::Running),
            };
            // SAFETY: the caller guarantees that this thread holds the GIL.
            match (occasion.or(requested), unsafe { GilToken::new(api) }) {
                (Some(occasion), Some(gil)) => {
                    // SAFETY: this thread has set `is_searching`, so no other thread accesses `state` until it clears
                    // it.
                    let state = unsafe { &mut *self.state.get() };
                    if let Err(reason) = state.search(process, gil, occasion) {
                        self.switch_off(reason);
                    }
                }
                (Some(_), None) => self.occasions.store(RUNNING, Ordering::Release),
                (None, _) => {}
            }
            process.count(Counter::HoldersMicroseconds, clock::monotonic_ns().saturating_sub(start) / 1000);
        }
        self.is_searching.store(false, Ordering::Release);
    }
}

impl State {
    fn search(
        &mut self,
        process: &'static Process,
        gil: GilToken<'_>,
        occasion: ScanOccasion,
    ) -> Result<(), &'static str> {
        // Before the program has imported PyTorch there are no tensors.
        if gil.class(c"torch.nn.modules.module", c"Module").is_none() {
            return Ok(());
        }
        if self.torch.is_none() {
            self.torch = Some(TorchSymbols::find()?);
        }
        let Some(torch) = &self.torch else { return Ok(()) };
        let Some(_gc_paused) = gil.pause_gc() else { return Err("the garbage collector cannot be paused") };
        let seq = process.segment.header().next_seq.0.load(Ordering::Relaxed).saturating_sub(1);
        let frames = process.python().and_then(|python| python.frame_locals());
        let mut labels = Labels::new(gil, frames);
        let found = search(gil, frames, labels.memory.as_ref(), torch.tensor_class);
        let mut tensors = TensorReader {
            torch,
            layout: &mut self.layout,
            cpu: records_cpu(process),
            reads_graphs: !running_nodes::is_any(),
        };
        let paths = tensors.paths(&found, &mut labels)?;
        let facts = ScanFacts { seq, occasion, objects: found.nodes.len() as u64, is_partial: found.is_partial };
        self.reported.write(process, &paths, &facts);
        Ok(())
    }
}

/// Whether tensors on the CPU are recorded.
fn records_cpu(process: &Process) -> bool {
    match process.options.cpu {
        Cpu::Always => true,
        Cpu::Auto => !device_use::is_in_use(),
        Cpu::Never => false,
    }
}

/// The interpreter calls this on its main thread, with the GIL. A result other than 0 would raise an exception.
unsafe extern "C" fn run_search(_: *mut c_void) -> c_int {
    let _errno = RestoreErrno::new();
    // `None` in a forked child that has recorded nothing yet: the request belongs to its parent.
    if let (Some(process), Some(holders), Some(api)) = (Process::if_started(), HOLDERS.get(), api::found())
        && holders.is_call_pending.swap(false, Ordering::AcqRel)
        && holders.is_on.load(Ordering::Relaxed)
    {
        holders.search(process, api, None);
    }
    0
}

/// The interpreter calls this on its main thread, with the GIL. A result other than 0 would raise an exception.
unsafe extern "C" fn install(_: *mut c_void) -> c_int {
    let _errno = RestoreErrno::new();
    if let (Some(holders), Some(api)) = (HOLDERS.get(), api::found())
        && !IS_INSTALLED.swap(true, Ordering::AcqRel)
    {
        // SAFETY: the interpreter makes pending calls with the GIL.
        let is_installed = unsafe { GilToken::new(api) }.is_some_and(register);
        IS_INSTALLED.store(is_installed, Ordering::Release);
        holders.is_install_pending.store(false, Ordering::Release);
    }
    0
}

/// Registers the function with `atexit`. Returns `false` if the program has not imported that module yet.
fn register(gil: GilToken<'_>) -> bool {
    let Some(register) = gil.builtin(c"atexit", c"register") else { return false };
    let Some(function) = gil.new_function(&AT_EXIT) else { return false };
    gil.untrack(function.object);
    // Our reference is never released: before 3.9 the interpreter may not free an object that is not tracked.
    let function = function.into_raw();
    gil.call(register, &[function]).is_some()
}

/// `atexit` calls this with the GIL, on the thread that ends the interpreter.
unsafe extern "C" fn at_exit(_: PyObjectPtr, _: PyObjectPtr) -> PyObjectPtr {
    let _errno = RestoreErrno::new();
    let Some(api) = api::found() else { return null_mut() };
    if let (Some(process), Some(holders)) = (Process::if_started(), HOLDERS.get())
        && holders.is_on.load(Ordering::Relaxed)
    {
        holders.search(process, api, Some(ScanOccasion::End));
    }
    // SAFETY: `atexit` calls its functions with the GIL.
    unsafe { new_none(api) }
}
