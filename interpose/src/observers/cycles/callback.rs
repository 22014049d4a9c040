//! The function in `gc.callbacks`: installs it, and shows what a collection has found.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_int, c_long, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicPtr, Ordering};

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, NoticeStatus};

use super::garbage::Garbage;
use super::show::{self, CycleReport, ShownCycles};
use super::torch_classes::TorchClasses;
use crate::cpython::api::{self, METH_VARARGS, MethodDef, PyObjectPtr};
use crate::cpython::calls::new_none;
use crate::cpython::gil::{GilToken, PyOwned};
use crate::recording::emit::truncate;
use crate::recording::errno::RestoreErrno;
use crate::recording::guard::Guard;
use crate::recording::observer::{Observer, WriteNotice};
use crate::recording::process::Process;
use crate::recording::slot::Slot;
use crate::torch::gc;

const TOPIC: &str = "python.cycles";
/// `gc.DEBUG_SAVEALL`.
const SAVE_ALL: c_long = 32;
/// A collection with more objects is not examined.
const MAX_OBJECTS: usize = 1 << 18;

/// The part of reference cycles in a recording.
pub(crate) const OBSERVER: Observer = Observer {
    start: Some(|options, _| CYCLES.set(Cycles::new(options.cycles))),
    collector_frees: Some(request_install),
    ..Observer::NONE
};

static CYCLES: Slot<Cycles> = Slot::new();

/// The state of one process.
struct Cycles {
    /// Whether the options request this feature.
    is_on: bool,
    /// Set while a pending call is queued in the interpreter.
    is_call_pending: AtomicBool,
    /// Accessed only with the GIL, inside [`gc_callback`]. The collector does not run while that function does, so it
    /// is never nested.
    shown_cycles: UnsafeCell<ShownCycles>,
}

// SAFETY: only the thread that runs `gc_callback` accesses `shown_cycles`. It holds the GIL, and collections do not
// nest. All other fields are atomic.
unsafe impl Sync for Cycles {}
// SAFETY: `shown_cycles` belongs to no thread. Whichever thread runs `gc_callback` with the GIL may access it.
unsafe impl Send for Cycles {}

/// The installed callback's objects, never freed. Null before.
static INSTALLED: AtomicPtr<Installed> = AtomicPtr::new(null_mut());
/// Set while a thread installs the callback, and for good if that has failed.
static INSTALLING: AtomicBool = AtomicBool::new(false);
/// The length of `gc.garbage` when the current collection began. Negative if the program itself uses `DEBUG_SAVEALL`,
/// or no collection runs.
static GARBAGE_BEFORE: AtomicIsize = AtomicIsize::new(-1);

/// Python objects with references that are never released.
struct Installed {
    get_debug: PyObjectPtr,
    set_debug: PyObjectPtr,
    garbage: PyObjectPtr,
    torch: TorchClasses,
}

static CALLBACK: MethodDef = MethodDef {
    name: c"memtrace_cycles".as_ptr(),
    body: gc_callback,
    flags: METH_VARARGS,
    doc: c"Shows reference cycles that held tensors (memtrace --cycles).".as_ptr(),
};

impl Cycles {
    /// `is_on` says whether the options request reference cycles.
    fn new(is_on: bool) -> Cycles {
        Cycles { is_on, is_call_pending: AtomicBool::new(false), shown_cycles: UnsafeCell::new(ShownCycles::default()) }
    }
}

/// Queues the installation. Called when a tensor's memory is freed by the collector, or for the first time. Needs no
/// GIL.
#[cold]
fn request_install(write_notice: &mut WriteNotice<'_>) {
    let Some(cycles) = CYCLES.get() else { return };
    if !cycles.is_on
        || !INSTALLED.load(Ordering::Acquire).is_null()
        || cycles.is_call_pending.swap(true, Ordering::AcqRel)
    {
        return;
    }
    let Some(api) = api::find().filter(|api| api.has_type_slots()) else {
        let reason = "reference cycles are not shown: this requires CPython 3.10 or later, with the GIL";
        return write_notice(TOPIC, NoticeStatus::Off, reason);
    };
    if !api.is_running() || !api.queue_call(install) {
        cycles.is_call_pending.store(false, Ordering::Release);
    }
}

fn notice(status: NoticeStatus, text: &str) {
    if let Some(mut guard) = Guard::enter() {
        guard.notice(TOPIC, status, text);
    }
}

/// The interpreter calls this on its main thread, with the GIL. A result other than 0 would raise an exception.
unsafe extern "C" fn install(_: *mut c_void) -> c_int {
    let _errno = RestoreErrno::new();
    if let (Some(cycles), Some(api)) = (Process::if_started().and_then(|_| CYCLES.get()), api::found())
        // An import returns to the interpreter's loop, which may make this pending call again.
        && !INSTALLING.swap(true, Ordering::AcqRel)
    {
        // SAFETY: the interpreter makes pending calls with the GIL.
        let gil = unsafe { GilToken::new(api) };
        if let Some(gil) = gil.filter(|gil| gil.is_imported(c"torch")) {
            match Installed::new(gil) {
                Ok(installed) => {
                    INSTALLED.store(Box::into_raw(Box::new(installed)), Ordering::Release);
                    notice(NoticeStatus::Works, "reference cycles that hold tensors are shown");
                }
                Err(reason) => {
                    notice(NoticeStatus::Off, &format!("reference cycles are not shown: {reason}"));
                    // `INSTALLING` stays set, so there is no further attempt.
                    return 0;
                }
            }
        }
        INSTALLING.store(false, Ordering::Release);
        // If PyTorch was not imported yet, the next collection that frees a tensor queues another attempt.
        cycles.is_call_pending.store(false, Ordering::Release);
    }
    0
}

impl Installed {
    /// Puts the callback into `gc.callbacks`.
    fn new(gil: GilToken<'_>) -> Result<Installed, String> {
        let gc = gil.import(c"gc")?;
        let gc_attribute = |name: &CStr| gil.attribute(gc.object, name).ok_or("the module gc is not CPython's");
        let (callbacks, garbage) = (gc_attribute(c"callbacks")?, gc_attribute(c"garbage")?);
        let (get_debug, set_debug) = (gc_attribute(c"get_debug")?, gc_attribute(c"set_debug")?);
        let torch = TorchClasses::find(gil)?;
        let callback = gil.new_function(&CALLBACK).ok_or("the interpreter is out of memory")?;
        if !gil.list_prepend(callbacks.object, callback.object) {
            return Err("gc.callbacks does not accept a function".to_owned());
        }
        let [get_debug, set_debug, garbage] = [get_debug, set_debug, garbage].map(PyOwned::into_raw);
        Ok(Installed { get_debug, set_debug, garbage, torch })
    }

    fn get_debug(&self, gil: GilToken<'_>) -> Option<c_long> {
        gil.call(self.get_debug, &[]).map(|flags| gil.as_int(flags.object))
    }

    fn set_debug(&self, gil: GilToken<'_>, flags: c_long) {
        if let Some(flags) = gil.new_int(flags) {
            gil.call(self.set_debug, &[flags.object]);
        }
    }

    fn start_collection(&self, gil: GilToken<'_>) {
        GARBAGE_BEFORE.store(-1, Ordering::Relaxed);
        let Some(flags) = self.get_debug(gil).filter(|flags| flags & SAVE_ALL == 0) else { return };
        GARBAGE_BEFORE.store(gil.list_len(self.garbage) as isize, Ordering::Relaxed);
        self.set_debug(gil, flags | SAVE_ALL);
    }

    fn stop_collection(&self, gil: GilToken<'_>, process: Option<(&'static Process, &Cycles)>) {
        let Ok(before) = usize::try_from(GARBAGE_BEFORE.swap(-1, Ordering::Relaxed)) else { return };
        if let Some(flags) = self.get_debug(gil) {
            self.set_debug(gil, flags & !SAVE_ALL);
        }
        if gil.list_len(self.garbage) <= before {
            return;
        }
        let Some(found) = gil.list_slice_from(self.garbage, before) else { return };
        gil.list_truncate(self.garbage, before);
        let found = Garbage { gil, list: found };
        if let Some((process, cycles)) = process {
            self.report_cycles(gil, process, cycles, &found);
        }
        if !found.free(self.garbage) {
            let text = "objects of a reference cycle were stored while they were shown: a later collection frees them";
            notice(NoticeStatus::Remark, text);
        }
    }

    fn report_cycles(&self, gil: GilToken<'_>, process: &'static Process, cycles: &Cycles, found: &Garbage<'_>) {
        let objects = found.objects();
        let is_tensor = |object: &PyObjectPtr| gil.is_instance(*object, self.torch.tensor);
        if !objects.iter().any(is_tensor) {
            return;
        }
        // Everything freed from here on belongs to this collection, even if other threads run meanwhile.
        gc::claim();
        if objects.len() > MAX_OBJECTS {
            return process.count(Counter::CyclesNotShown, 1);
        }
        // SAFETY: this thread holds the GIL inside `gc_callback`, and collections do not nest, so there is no other
        // reference.
        let shown_cycles = unsafe { &mut *cycles.shown_cycles.get() };
        let graph = found.graph(&objects);
        let reports = show::cycles(gil, &self.torch, process, shown_cycles, &graph, &objects);
        let seq = process.segment.header().next_seq.0.load(Ordering::Relaxed).saturating_sub(1);
        let Some(mut guard) = Guard::enter() else { return };
        for CycleReport { file, text, addresses } in &reports {
            let text = truncate(process, text);
            for address in addresses {
                guard.define(&Definition::Cycle { address: *address, seq, file, text });
            }
        }
    }
}

/// `callback(phase, info)`. The collector calls it with the GIL.
unsafe extern "C" fn gc_callback(_: PyObjectPtr, arguments: PyObjectPtr) -> PyObjectPtr {
    let _errno = RestoreErrno::new();
    let Some(api) = api::found() else { return null_mut() };
    // SAFETY: the pointer is null or comes from a box that `install` has leaked.
    let installed = unsafe { INSTALLED.load(Ordering::Acquire).as_ref() };
    // SAFETY: the collector runs its callbacks with the GIL.
    if let (Some(installed), Some(gil)) = (installed, unsafe { GilToken::new(api) }) {
        let phase = gil.elements(arguments).next().and_then(|phase| gil.str(phase));
        // In a forked child without a recording, the saved objects are freed all the same.
        let process = Process::if_started().zip(CYCLES.get()).filter(|(_, cycles)| cycles.is_on);
        match phase {
            Some("start") if process.is_some() => installed.start_collection(gil),
            Some("stop") => installed.stop_collection(gil, process),
            _ => {}
        }
    }
    // SAFETY: the collector runs its callbacks with the GIL.
    unsafe { new_none(api) }
}
