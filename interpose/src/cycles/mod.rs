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
use memtrace_trace::definition::{Definition, Verdict};

use self::graph::Graph;
use self::python::{Held, Interface, Method, Object, Session, VARARGS, references};
use self::show::{Known, Shown, Torch};
use crate::emit::cut;
use crate::guard::Guard;
use crate::hooks;
use crate::process::Process;

const TOPIC: &str = "python.cycles";
/// `gc.DEBUG_SAVEALL`.
const SAVE_ALL: c_long = 32;
/// A collection with more objects is not examined.
const MOST_OBJECTS: usize = 1 << 18;

/// The state of one process.
pub(crate) struct Cycles {
    /// Whether the options request this feature.
    on: bool,
    /// Set while a pending call is queued in the interpreter.
    asked: AtomicBool,
    /// Accessed only with the GIL, inside [`collected`]. The collector does not run while that function does, so it is
    /// never nested.
    known: UnsafeCell<Known>,
}

// SAFETY: only the thread that runs `collected` accesses `known`. It holds the GIL, and collections do not nest. All
// other fields are atomic.
unsafe impl Sync for Cycles {}
// SAFETY: `known` belongs to no thread. Whichever thread runs `collected` with the GIL may access it.
unsafe impl Send for Cycles {}

/// The interpreter's functions. Belongs to the loaded library and is inherited by forked children, as is the entry in
/// `gc.callbacks`.
static INTERFACE: OnceLock<Option<Interface>> = OnceLock::new();
/// The installed callback's objects, never freed. Null before.
static INSTALLED: AtomicPtr<Installed> = AtomicPtr::new(null_mut());
/// Set while a thread installs the callback, and for good if that has failed.
static INSTALLING: AtomicBool = AtomicBool::new(false);
/// The length of `gc.garbage` when the current collection began. Negative if the program itself uses `DEBUG_SAVEALL`,
/// or no collection runs.
static BEGAN: AtomicIsize = AtomicIsize::new(-1);

/// Python objects with references that are never released.
struct Installed {
    debug: Object,
    set_debug: Object,
    garbage: Object,
    torch: Torch,
}

static CALLBACK: Method = Method {
    name: c"memtrace_cycles".as_ptr(),
    body: collected,
    flags: VARARGS,
    doc: c"Shows reference cycles that held tensors (memtrace --cycles).".as_ptr(),
};

impl Cycles {
    /// `on` says whether the options request reference cycles.
    pub(crate) fn new(on: bool) -> Cycles {
        Cycles { on, asked: AtomicBool::new(false), known: UnsafeCell::new(Known::default()) }
    }

    /// Queues the installation. Called when a tensor's memory is freed by the collector, or for the first time. Needs
    /// no GIL.
    #[cold]
    pub(crate) fn ask(guard: &mut Guard) {
        let cycles = &guard.process().cycles;
        if !cycles.on || !INSTALLED.load(Ordering::Acquire).is_null() || cycles.asked.swap(true, Ordering::AcqRel) {
            return;
        }
        let Some(interface) = INTERFACE.get_or_init(Interface::find) else {
            let why = "reference cycles are not shown: this takes CPython 3.10 or later, with the GIL";
            return guard.notice(TOPIC, Verdict::Off, why);
        };
        if !interface.call_soon(install) {
            cycles.asked.store(false, Ordering::Release);
        }
    }
}

fn notice(verdict: Verdict, text: &str) {
    if let Some(mut guard) = Guard::enter() {
        guard.notice(TOPIC, verdict, text);
    }
}

/// The interpreter calls this on its main thread, with the GIL. A result other than 0 would raise an exception.
unsafe extern "C" fn install(_: *mut c_void) -> c_int {
    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the thread.
    let errno = unsafe { *libc::__errno_location() };
    if let (Some(process), Some(Some(interface))) = (Process::if_started(), INTERFACE.get())
        // An import returns to the interpreter's loop, which may make this pending call again.
        && !INSTALLING.swap(true, Ordering::AcqRel)
    {
        // SAFETY: the interpreter makes pending calls with the GIL.
        let session = unsafe { interface.session() };
        if let Some(session) = session.filter(|session| session.is_imported(c"torch")) {
            match Installed::new(session) {
                Ok((installed, words_only)) => {
                    INSTALLED.store(Box::into_raw(Box::new(installed)), Ordering::Release);
                    match words_only {
                        None => notice(Verdict::Works, "reference cycles that hold tensors are shown"),
                        Some(why) => {
                            let why = format!(
                                "no pictures of reference cycles, only words: this PyTorch has no torch.utils.viz._cycles ({why})"
                            );
                            notice(Verdict::Off, &why);
                        }
                    }
                }
                Err(why) => {
                    notice(Verdict::Off, &format!("reference cycles are not shown: {why}"));
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
        process.cycles.asked.store(false, Ordering::Release);
    }
    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the thread.
    unsafe { *libc::__errno_location() = errno };
    0
}

impl Installed {
    /// Puts the callback into `gc.callbacks`. The second result is the reason why there are no pictures, if there are
    /// none.
    fn new(session: Session<'_>) -> Result<(Installed, Option<String>), String> {
        let gc = session.import(c"gc")?;
        let of_gc = |name: &CStr| session.attribute(gc.object, name).ok_or("the module gc is not CPython's");
        let (callbacks, garbage) = (of_gc(c"callbacks")?, of_gc(c"garbage")?);
        let (debug, set_debug) = (of_gc(c"get_debug")?, of_gc(c"set_debug")?);
        let torch = session.import(c"torch")?;
        let (torch, words_only) = Torch::new(session, &torch)?;
        let callback = session.function(&CALLBACK).ok_or("the interpreter has no memory")?;
        if !session.list_prepend(callbacks.object, callback.object) {
            return Err("gc.callbacks takes no function".to_owned());
        }
        let [debug, set_debug, garbage] = [debug, set_debug, garbage].map(Held::keep);
        Ok((Installed { debug, set_debug, garbage, torch }, words_only))
    }

    fn debug(&self, session: Session<'_>) -> Option<c_long> {
        session.call(self.debug, &[], &[]).map(|flags| session.as_number(flags.object))
    }

    fn set_debug(&self, session: Session<'_>, flags: c_long) {
        if let Some(flags) = session.number(flags) {
            session.call(self.set_debug, &[flags.object], &[]);
        }
    }

    fn begins(&self, session: Session<'_>) {
        BEGAN.store(-1, Ordering::Relaxed);
        let Some(flags) = self.debug(session).filter(|flags| flags & SAVE_ALL == 0) else { return };
        BEGAN.store(session.list_len(self.garbage) as isize, Ordering::Relaxed);
        self.set_debug(session, flags | SAVE_ALL);
    }

    fn ends(&self, session: Session<'_>, process: Option<&'static Process>) {
        let Ok(began) = usize::try_from(BEGAN.swap(-1, Ordering::Relaxed)) else { return };
        if let Some(flags) = self.debug(session) {
            self.set_debug(session, flags & !SAVE_ALL);
        }
        if session.list_len(self.garbage) <= began {
            return;
        }
        let Some(found) = session.list_tail(self.garbage, began) else { return };
        session.list_cut(self.garbage, began);
        let found = Garbage { session, list: found };
        if let Some(process) = process {
            self.look(session, process, &found);
        }
        found.free(self.garbage);
    }

    fn look(&self, session: Session<'_>, process: &'static Process, found: &Garbage<'_>) {
        let objects = found.objects();
        let is_tensor = |object: &Object| session.is_instance(*object, self.torch.tensor);
        if !objects.iter().any(is_tensor) {
            return;
        }
        // Everything freed from here on belongs to this collection, even if other threads run while Python code does.
        hooks::claim_collection();
        if objects.len() > MOST_OBJECTS {
            return process.count(Counter::CyclesNotShown, 1);
        }
        // SAFETY: this thread holds the GIL inside `collected`, and collections do not nest, so there is no other
        // reference.
        let known = unsafe { &mut *process.cycles.known.get() };
        let graph = found.graph(&objects);
        let shown = show::cycles(session, &self.torch, process, known, &graph, &objects);
        let seq = process.segment.header().next_seq.0.load(Ordering::Relaxed).saturating_sub(1);
        let Some(mut guard) = Guard::enter() else { return };
        for Shown { file, text, addresses } in &shown {
            let text = cut(process, text);
            for address in addresses {
                guard.define(&Definition::Cycle { address: *address, seq, file, text });
            }
        }
    }
}

/// `callback(phase, info)`. The collector calls it with the GIL.
unsafe extern "C" fn collected(_: Object, arguments: Object) -> Object {
    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the thread.
    let errno = unsafe { *libc::__errno_location() };
    let Some(Some(interface)) = INTERFACE.get() else { return null_mut() };
    // SAFETY: the pointer is null or comes from a box that `install` has leaked.
    let installed = unsafe { INSTALLED.load(Ordering::Acquire).as_ref() };
    // SAFETY: the collector runs its callbacks with the GIL.
    if let (Some(installed), Some(session)) = (installed, unsafe { interface.session() }) {
        let phase = session.tuple(arguments).next().and_then(|phase| session.utf8(phase));
        // In a forked child without a recording, the saved objects are freed all the same.
        let process = Process::if_started().filter(|process| process.cycles.on);
        match phase {
            Some("start") if process.is_some() => installed.begins(session),
            Some("stop") => installed.ends(session, process),
            _ => {}
        }
    }
    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the thread.
    unsafe { *libc::__errno_location() = errno };
    // SAFETY: the collector runs its callbacks with the GIL.
    unsafe { interface.nothing() }
}

/// The findings of one collection, held by our list.
struct Garbage<'a> {
    session: Session<'a>,
    list: Held<'a>,
}

/// Collects references while objects are traversed.
struct Traversal<'a> {
    session: Session<'a>,
    numbers: &'a HashMap<usize, u32>,
    graph: Graph,
    /// Attribute dictionaries that CPython created for objects during the traversal.
    made: Vec<Object>,
}

unsafe extern "C" fn visit(object: Object, traversal: *mut c_void) -> c_int {
    // SAFETY: `Garbage::graph` passes a pointer to its own `Traversal`, which nothing else uses during the call.
    let traversal = unsafe { &mut *traversal.cast::<Traversal<'_>>() };
    if let Some(number) = traversal.numbers.get(&object.addr()) {
        traversal.graph.holds(*number);
    // SAFETY: the traversed object holds `object`, so it is alive.
    } else if traversal.session.is_dict(object) && unsafe { references(object) } == 1 {
        traversal.made.push(object);
    }
    0
}

impl Garbage<'_> {
    fn objects(&self) -> Vec<Object> {
        let count = self.session.list_len(self.list.object);
        (0..count).map_while(|at| self.session.list_item(self.list.object, at)).collect()
    }

    /// The references between these objects. A dictionary of attributes that is not among them counts as part of its
    /// object.
    fn graph(&self, objects: &[Object]) -> Graph {
        let numbers: HashMap<usize, u32> = (0..).zip(objects).map(|(number, object)| (object.addr(), number)).collect();
        let mut traversal =
            Traversal { session: self.session, numbers: &numbers, graph: Graph::default(), made: Vec::new() };
        for object in objects {
            traversal.graph.object();
            let with = (&raw mut traversal).cast();
            self.session.traverse(*object, visit, with);
            while let Some(made) = traversal.made.pop() {
                let with = (&raw mut traversal).cast();
                self.session.traverse(made, visit, with);
            }
        }
        traversal.graph
    }

    /// Whether nothing outside these objects holds any of them.
    fn is_garbage(&self, objects: &[Object]) -> bool {
        let graph = self.graph(objects);
        let mut held = vec![1_usize; objects.len()];
        for number in 0..objects.len() as u32 {
            for other in graph.held_by(number) {
                if let Some(count) = held.get_mut(*other as usize) {
                    *count += 1;
                }
            }
        }
        // SAFETY: the list holds a reference to each object, so all are alive.
        objects.iter().zip(held).all(|(object, held)| unsafe { references(*object) } == held)
    }

    /// Frees the objects in order, as the collector does: clears each one that others still hold.
    fn free(self, garbage: Object) {
        let objects = self.objects();
        if !self.is_garbage(&objects) {
            return notice(
                Verdict::Remark,
                "objects of a reference cycle were stored when they were shown: they are left to a later collection",
            );
        }
        let (session, list) = (self.session, &self.list);
        for (at, object) in objects.into_iter().enumerate() {
            if session.is_left_to_the_program(object) {
                session.list_append(garbage, object);
                continue;
            }
            // SAFETY: the object is garbage, and the list holds a reference to it until `list_drop` below.
            unsafe {
                if references(object) > 1 {
                    session.clear(object);
                }
            }
            session.list_drop(list.object, at);
        }
    }
}
