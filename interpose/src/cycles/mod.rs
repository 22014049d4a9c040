//! `--cycles`: which objects held tensors' memory until the cyclic garbage collector came. Runs Python code in the program, so only on request.
//!
//! `torch.utils.viz._cycles` shows such objects, but its `observe_tensor_cycles` turns on PyTorch's own recording of memory, empties
//! `gc.garbage`, forgets the program's debug flags, sets a profile function, collects everything twice after each collection, and sees
//! CUDA tensors only. So its `create_graph` and `to_html` are used, and this does the rest:
//!
//! A function of ours in `gc.callbacks` sets `gc.DEBUG_SAVEALL` while the collector is at work: what it finds is then not freed but put
//! at the end of `gc.garbage`, where it is taken away again before any other callback can see it. What cycles hold a tensor is worked out
//! ([`graph`]) and shown ([`show`]). Then the objects are let go of as the collector would have done it, before it ends: the memory is
//! freed in the same collection, and no other takes place. That they still are garbage is made sure of first: each has no more references
//! than the others of them hold. If Python code that was run to show them has stored one, all are left to the next collection.
//!
//! The function is put into the list by a pending call (as in [`crate::names`]), at the first free of a tensor after PyTorch was imported.

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
/// Objects of one collection that are looked at, at most.
const MOST_OBJECTS: usize = 1 << 18;

/// See the module. One a process.
pub(crate) struct Cycles {
    /// What to show has been asked for.
    on: bool,
    /// The interpreter has been asked to call.
    asked: AtomicBool,
    /// Used with the GIL, within [`collected`], which does not come back to itself: while it runs, the collector does not.
    known: UnsafeCell<Known>,
}

// SAFETY: `known` is used by the thread that has the GIL and whose collection it is; the rest is atomic.
unsafe impl Sync for Cycles {}
// SAFETY: as above.
unsafe impl Send for Cycles {}

/// The interpreter's functions; of this image and of the children it forks, which inherit what was put into `gc.callbacks`.
static INTERFACE: OnceLock<Option<Interface>> = OnceLock::new();
/// What was installed, never freed; null before.
static INSTALLED: AtomicPtr<Installed> = AtomicPtr::new(null_mut());
static INSTALLING: AtomicBool = AtomicBool::new(false);
/// How long `gc.garbage` was when the present collection began; negative where the program itself saves all, or none is under way.
static BEGAN: AtomicIsize = AtomicIsize::new(-1);

/// Objects that we hold references of for ever.
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
    pub(crate) fn new(on: bool) -> Cycles {
        Cycles { on, asked: AtomicBool::new(false), known: UnsafeCell::new(Known::default()) }
    }

    /// A tensor's memory is freed, by the collector or for the first time. Needs no GIL.
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

/// Called by the interpreter on its main thread, with the GIL. Must return 0, or it raises.
unsafe extern "C" fn install(_: *mut c_void) -> c_int {
    // SAFETY: errno is the thread's own.
    let errno = unsafe { *libc::__errno_location() };
    if let (Some(process), Some(Some(interface))) = (Process::if_started(), INTERFACE.get())
        // Imports come back to the interpreter's loop, which may call again.
        && !INSTALLING.swap(true, Ordering::AcqRel)
    {
        // SAFETY: the interpreter calls with the GIL.
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
                    // Not tried again.
                    // SAFETY: errno is the thread's own.
                    unsafe { *libc::__errno_location() = errno };
                    return 0;
                }
            }
        }
        INSTALLING.store(false, Ordering::Release);
        // The next collection that frees a tensor asks again, where it was too early.
        process.cycles.asked.store(false, Ordering::Release);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    0
}

impl Installed {
    /// Puts the callback into `gc.callbacks`. Beside it: why there are no pictures.
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
        // What is freed from here on is this collection's, also if others come to run while Python code does.
        hooks::claim_collection();
        if objects.len() > MOST_OBJECTS {
            return process.count(Counter::CyclesNotShown, 1);
        }
        // SAFETY: with the GIL, in the only collection there is.
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

/// `callback(phase, info)`, by the collector, with the GIL.
unsafe extern "C" fn collected(_: Object, arguments: Object) -> Object {
    // SAFETY: errno is the thread's own.
    let errno = unsafe { *libc::__errno_location() };
    let Some(Some(interface)) = INTERFACE.get() else { return null_mut() };
    // SAFETY: null, or made by `install` and never freed.
    let installed = unsafe { INSTALLED.load(Ordering::Acquire).as_ref() };
    // SAFETY: the collector calls with the GIL.
    if let (Some(installed), Some(session)) = (installed, unsafe { interface.session() }) {
        let phase = session.tuple(arguments).next().and_then(|phase| session.utf8(phase));
        // In a forked child that has recorded nothing, what was saved is freed all the same.
        let process = Process::if_started().filter(|process| process.cycles.on);
        match phase {
            Some("start") if process.is_some() => installed.begins(session),
            Some("stop") => installed.ends(session, process),
            _ => {}
        }
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    // SAFETY: with the GIL.
    unsafe { interface.nothing() }
}

/// What a collection found, held by a list of ours.
struct Garbage<'a> {
    session: Session<'a>,
    list: Held<'a>,
}

/// Where references go while objects are traversed.
struct Traversal<'a> {
    session: Session<'a>,
    numbers: &'a HashMap<usize, u32>,
    graph: Graph,
    /// Dictionaries that were made for objects' attributes meanwhile.
    made: Vec<Object>,
}

unsafe extern "C" fn visit(object: Object, traversal: *mut c_void) -> c_int {
    // SAFETY: `Garbage::traverse` gave its own, which nobody else uses meanwhile.
    let traversal = unsafe { &mut *traversal.cast::<Traversal<'_>>() };
    if let Some(number) = traversal.numbers.get(&object.addr()) {
        traversal.graph.holds(*number);
    // SAFETY: a live object.
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

    /// Which of them hold which. A dictionary of attributes that is not among them counts as the object whose it is.
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

    /// Whether nobody else holds any of them.
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
        // SAFETY: live objects: the list has a reference of each.
        objects.iter().zip(held).all(|(object, held)| unsafe { references(*object) } == held)
    }

    /// Frees them, as the collector does: in order, each that is still held by others is told to let go of what it holds.
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
            // SAFETY: the list has a reference of it until the next line; it is garbage.
            unsafe {
                if references(object) > 1 {
                    session.clear(object);
                }
            }
            session.list_drop(list.object, at);
        }
    }
}
