//! `--cycles`: shows which objects held tensors' memory until the cyclic garbage collector ran. It runs Python code in
//! the program, so only on request.
//!
//! `torch.utils.viz._cycles` shows such objects too, but its `observe_tensor_cycles` has side effects. It starts
//! PyTorch's own memory recording, empties `gc.garbage`, drops the program's debug flags and sets a profile function.
//! It runs two full collections after each collection and sees only CUDA tensors. So only its `create_graph` and
//! `to_html` are used.
//!
//! Our function in `gc.callbacks` sets `gc.DEBUG_SAVEALL` while the collector runs. The collector then appends its
//! findings to `gc.garbage` instead of freeing them. The function removes them from there before any other callback
//! runs. It finds the cycles that hold tensors ([`graph`]) and renders them ([`show`]).
//!
//! Before the collection ends, it frees the objects in the way the collector would. So the memory is freed in the same
//! collection, and no further one runs. First it verifies that the objects are still garbage: each has only the
//! references that the others hold. If Python code has stored one of them meanwhile, all are left to the next
//! collection.
//!
//! A pending call (as in [`crate::names`]) registers the function at the first free of a tensor after PyTorch was
//! imported.

mod graph;
mod python;
mod show;

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_long, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicPtr, Ordering};

use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, NoticeStatus};

use self::graph::ReferenceGraph;
use self::python::{CApi, GilToken, METH_VARARGS, MethodDef, OwnedRef, PyObjectPtr, reference_count};
use self::show::{CycleReport, ShownCycles, TorchClasses};
use crate::emit::truncate;
use crate::guard::Guard;
use crate::hooks;
use crate::process::Process;

const TOPIC: &str = "python.cycles";
/// `gc.DEBUG_SAVEALL`.
const SAVE_ALL: c_long = 32;
/// A collection with more objects is not examined.
const MAX_OBJECTS: usize = 1 << 18;

/// The state of one process.
pub(crate) struct Cycles {
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

/// The interpreter's functions. Belongs to the loaded library and is inherited by forked children, as is the entry in
/// `gc.callbacks`.
static C_API: OnceLock<Option<CApi>> = OnceLock::new();
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
    pub(crate) fn new(is_on: bool) -> Cycles {
        Cycles { is_on, is_call_pending: AtomicBool::new(false), shown_cycles: UnsafeCell::new(ShownCycles::default()) }
    }

    /// Queues the installation. Called when a tensor's memory is freed by the collector, or for the first time. Needs
    /// no GIL.
    #[cold]
    pub(crate) fn request_install(guard: &mut Guard) {
        let cycles = &guard.process().cycles;
        if !cycles.is_on
            || !INSTALLED.load(Ordering::Acquire).is_null()
            || cycles.is_call_pending.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let Some(api) = C_API.get_or_init(CApi::find) else {
            let reason = "reference cycles are not shown: this requires CPython 3.10 or later, with the GIL";
            return guard.notice(TOPIC, NoticeStatus::Off, reason);
        };
        if !api.queue_call(install) {
            cycles.is_call_pending.store(false, Ordering::Release);
        }
    }
}

fn notice(status: NoticeStatus, text: &str) {
    if let Some(mut guard) = Guard::enter() {
        guard.notice(TOPIC, status, text);
    }
}

/// The interpreter calls this on its main thread, with the GIL. A result other than 0 would raise an exception.
unsafe extern "C" fn install(_: *mut c_void) -> c_int {
    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the thread.
    let errno = unsafe { *libc::__errno_location() };
    if let (Some(process), Some(Some(api))) = (Process::if_started(), C_API.get())
        // An import returns to the interpreter's loop, which may make this pending call again.
        && !INSTALLING.swap(true, Ordering::AcqRel)
    {
        // SAFETY: the interpreter makes pending calls with the GIL.
        let gil = unsafe { api.gil_token() };
        if let Some(gil) = gil.filter(|gil| gil.is_imported(c"torch")) {
            match Installed::new(gil) {
                Ok((installed, no_pictures_reason)) => {
                    INSTALLED.store(Box::into_raw(Box::new(installed)), Ordering::Release);
                    match no_pictures_reason {
                        None => notice(NoticeStatus::Works, "reference cycles that hold tensors are shown"),
                        Some(reason) => {
                            let reason = format!(
                                "reference cycles are shown as text only: this PyTorch has no torch.utils.viz._cycles ({reason})"
                            );
                            notice(NoticeStatus::Off, &reason);
                        }
                    }
                }
                Err(reason) => {
                    notice(NoticeStatus::Off, &format!("reference cycles are not shown: {reason}"));
                    // `INSTALLING` stays set, so there is no further attempt.
                    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the
                    // thread.
                    unsafe { *libc::__errno_location() = errno };
                    return 0;
                }
            }
        }
        INSTALLING.store(false, Ordering::Release);
        // If PyTorch was not imported yet, the next collection that frees a tensor queues another attempt.
        process.cycles.is_call_pending.store(false, Ordering::Release);
    }
    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the thread.
    unsafe { *libc::__errno_location() = errno };
    0
}

impl Installed {
    /// Puts the callback into `gc.callbacks`. The second result is the reason why there are no pictures, if there are
    /// none.
    fn new(gil: GilToken<'_>) -> Result<(Installed, Option<String>), String> {
        let gc = gil.import(c"gc")?;
        let gc_attribute = |name: &CStr| gil.attribute(gc.object, name).ok_or("the module gc is not CPython's");
        let (callbacks, garbage) = (gc_attribute(c"callbacks")?, gc_attribute(c"garbage")?);
        let (get_debug, set_debug) = (gc_attribute(c"get_debug")?, gc_attribute(c"set_debug")?);
        let torch = gil.import(c"torch")?;
        let (torch, no_pictures_reason) = TorchClasses::new(gil, &torch)?;
        let callback = gil.new_function(&CALLBACK).ok_or("the interpreter is out of memory")?;
        if !gil.list_prepend(callbacks.object, callback.object) {
            return Err("gc.callbacks does not accept a function".to_owned());
        }
        let [get_debug, set_debug, garbage] = [get_debug, set_debug, garbage].map(OwnedRef::into_raw);
        Ok((Installed { get_debug, set_debug, garbage, torch }, no_pictures_reason))
    }

    fn get_debug(&self, gil: GilToken<'_>) -> Option<c_long> {
        gil.call(self.get_debug, &[], &[]).map(|flags| gil.as_int(flags.object))
    }

    fn set_debug(&self, gil: GilToken<'_>, flags: c_long) {
        if let Some(flags) = gil.new_int(flags) {
            gil.call(self.set_debug, &[flags.object], &[]);
        }
    }

    fn start_collection(&self, gil: GilToken<'_>) {
        GARBAGE_BEFORE.store(-1, Ordering::Relaxed);
        let Some(flags) = self.get_debug(gil).filter(|flags| flags & SAVE_ALL == 0) else { return };
        GARBAGE_BEFORE.store(gil.list_len(self.garbage) as isize, Ordering::Relaxed);
        self.set_debug(gil, flags | SAVE_ALL);
    }

    fn stop_collection(&self, gil: GilToken<'_>, process: Option<&'static Process>) {
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
        if let Some(process) = process {
            self.report_cycles(gil, process, &found);
        }
        found.free(self.garbage);
    }

    fn report_cycles(&self, gil: GilToken<'_>, process: &'static Process, found: &Garbage<'_>) {
        let objects = found.objects();
        let is_tensor = |object: &PyObjectPtr| gil.is_instance(*object, self.torch.tensor);
        if !objects.iter().any(is_tensor) {
            return;
        }
        // Everything freed from here on belongs to this collection, even if other threads run while Python code does.
        hooks::claim_collection();
        if objects.len() > MAX_OBJECTS {
            return process.count(Counter::CyclesNotShown, 1);
        }
        // SAFETY: this thread holds the GIL inside `gc_callback`, and collections do not nest, so there is no other
        // reference.
        let shown_cycles = unsafe { &mut *process.cycles.shown_cycles.get() };
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
    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the thread.
    let errno = unsafe { *libc::__errno_location() };
    let Some(Some(api)) = C_API.get() else { return null_mut() };
    // SAFETY: the pointer is null or comes from a box that `install` has leaked.
    let installed = unsafe { INSTALLED.load(Ordering::Acquire).as_ref() };
    // SAFETY: the collector runs its callbacks with the GIL.
    if let (Some(installed), Some(gil)) = (installed, unsafe { api.gil_token() }) {
        let phase = gil.tuple(arguments).next().and_then(|phase| gil.utf8(phase));
        // In a forked child without a recording, the saved objects are freed all the same.
        let process = Process::if_started().filter(|process| process.cycles.is_on);
        match phase {
            Some("start") if process.is_some() => installed.start_collection(gil),
            Some("stop") => installed.stop_collection(gil, process),
            _ => {}
        }
    }
    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the thread.
    unsafe { *libc::__errno_location() = errno };
    // SAFETY: the collector runs its callbacks with the GIL.
    unsafe { api.new_none() }
}

/// The findings of one collection, held by our list.
struct Garbage<'a> {
    gil: GilToken<'a>,
    list: OwnedRef<'a>,
}

/// Collects references while objects are traversed.
struct Traversal<'a> {
    gil: GilToken<'a>,
    numbers: &'a HashMap<usize, u32>,
    graph: ReferenceGraph,
    /// Attribute dictionaries that CPython created for objects during the traversal.
    new_dicts: Vec<PyObjectPtr>,
}

unsafe extern "C" fn visit(object: PyObjectPtr, traversal: *mut c_void) -> c_int {
    // SAFETY: `Garbage::graph` passes a pointer to its own `Traversal`, which nothing else uses during the call.
    let traversal = unsafe { &mut *traversal.cast::<Traversal<'_>>() };
    if let Some(number) = traversal.numbers.get(&object.addr()) {
        traversal.graph.add_reference(*number);
    // SAFETY: the traversed object holds `object`, so it is alive.
    } else if traversal.gil.is_dict(object) && unsafe { reference_count(object) } == 1 {
        traversal.new_dicts.push(object);
    }
    0
}

impl Garbage<'_> {
    fn objects(&self) -> Vec<PyObjectPtr> {
        let count = self.gil.list_len(self.list.object);
        (0..count).map_while(|at| self.gil.list_item(self.list.object, at)).collect()
    }

    /// The references between these objects. A dictionary of attributes that is not among them counts as part of its
    /// object.
    fn graph(&self, objects: &[PyObjectPtr]) -> ReferenceGraph {
        let numbers: HashMap<usize, u32> = (0..).zip(objects).map(|(number, object)| (object.addr(), number)).collect();
        let mut traversal =
            Traversal { gil: self.gil, numbers: &numbers, graph: ReferenceGraph::default(), new_dicts: Vec::new() };
        for object in objects {
            traversal.graph.add_object();
            let with = (&raw mut traversal).cast();
            self.gil.traverse(*object, visit, with);
            while let Some(dict) = traversal.new_dicts.pop() {
                let with = (&raw mut traversal).cast();
                self.gil.traverse(dict, visit, with);
            }
        }
        traversal.graph
    }

    /// Whether nothing outside these objects holds any of them.
    fn is_garbage(&self, objects: &[PyObjectPtr]) -> bool {
        let graph = self.graph(objects);
        let mut expected = vec![1_usize; objects.len()];
        for number in 0..objects.len() as u32 {
            for other in graph.references_of(number) {
                if let Some(count) = expected.get_mut(*other as usize) {
                    *count += 1;
                }
            }
        }
        // SAFETY: the list holds a reference to each object, so all are alive.
        objects.iter().zip(expected).all(|(object, expected)| unsafe { reference_count(*object) } == expected)
    }

    /// Frees the objects in order, as the collector does: clears each one that others still hold.
    fn free(self, garbage: PyObjectPtr) {
        let objects = self.objects();
        if !self.is_garbage(&objects) {
            return notice(
                NoticeStatus::Remark,
                "objects of a reference cycle were stored while they were shown: a later collection frees them",
            );
        }
        let (gil, list) = (self.gil, &self.list);
        for (at, object) in objects.into_iter().enumerate() {
            if gil.has_tp_del(object) {
                gil.list_append(garbage, object);
                continue;
            }
            // SAFETY: the object is garbage, and the list holds a reference to it until `list_clear_item` below.
            unsafe {
                if reference_count(object) > 1 {
                    gil.clear(object);
                }
            }
            gil.list_clear_item(list.object, at);
        }
    }
}
