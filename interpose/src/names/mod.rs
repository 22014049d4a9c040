//! What the program calls its tensors and modules: `layer1.0.conv1.weight`, its `.grad`, `Adam.exp_avg of layer1.0.conv1.weight`.
//!
//! Only the program's own objects know. They are read where the interpreter is between two instructions and holds the GIL
//! (`Py_AddPendingCall`, as in [`crate::origins`]): no Python code runs, nothing is made or kept, no reference count is changed beyond the look. The
//! garbage collector's list shows all `nn.Module`s and optimizers there are; a module that no other holds is a model. That scan
//! of all objects takes milliseconds, so the models it found are scanned again without it: an object that its two
//! neighbors in the collector's list still name is alive.
//!
//! *When*: after a backward pass (the gradients are there), around an optimizer's step (so is what it keeps), when an allocation fails,
//! when a module or an optimizer is called that no scan has seen, and, in a program that does none of these, once it has freed 16, 128,
//! 1024 ... blocks. [`schedule`] decides which of these occasions are taken: by their number, never by a clock. A name is reported
//! again only of other memory: freeing a block changes a number by its address.

mod python;
mod roots;
mod schedule;
mod tensors;
mod walk;

use std::cell::UnsafeCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_void};
use std::hash::{Hash, Hasher};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use memtrace_trace::clock;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, TensorKind, Verdict};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::options::Cpu;

pub(crate) use self::python::type_name;
use self::python::{Interface, Object, Session};
use self::roots::Root;
use self::schedule::{Facts, Scan, Schedule, cause};
use self::tensors::{Layout, Torch};
use self::walk::{Listener, Parameters, Spread, Spreading, Walk};
use crate::emit::cut;
use crate::guard::Guard;
use crate::hooks;
use crate::process::Process;
use crate::stack::CheckedMemory;
use crate::thread::thread;

/// Blocks freed when a program without a backward pass is first scanned, and by what that grows.
const FIRST_FREES: u32 = 16;
const FREES_GROW: u32 = 8;
/// Blocks freed from the first call of an unknown module, in a program that does not train, to the scan for it: by then all its modules
/// have been called, or a backward pass has come.
const FREES_AFTER_CALL: u32 = 128;
/// How often a scan waits for a constructor to end.
const MOST_POSTPONED: u32 = 16;
/// Optimizers that are told apart by where they are stepped, at most.
const MOST_SITES: usize = 64;
/// Modules remembered as scanned, at most.
const MOST_MODULES: usize = 1 << 16;
const TOPIC: &str = "torch.names";
/// Models and optimizers that are scanned again, at most; a program with more has them searched for each time.
const MOST_KNOWN: usize = 256;
/// Tensors on a device that are no proof of the layout, until it is given up.
const MOST_MISSES: u32 = 256;
/// A name's own bytes, beside its text.
const NEWS: usize = 32;
/// Bytes of names, at most.
const MOST_BYTES: usize = 64 << 20;
/// Names remembered as told, at most.
const MOST_REMEMBERED: usize = 1 << 19;
/// Places for addresses.
const PLACES: usize = 1 << 15;
/// The garbage collector's two words lie in front of an object.
const LINKS: usize = 16;
/// What the collector keeps in the low bits of its links.
const LINK_FLAGS: usize = 3;

/// Threads that run an autograd node now, in any process of this image.
static EVALUATING: AtomicU32 = AtomicU32::new(0);
/// A scan waits for the last of them to end.
static POSTPONED: AtomicBool = AtomicBool::new(false);

/// An autograd node begins to run on this thread.
#[inline]
pub(crate) fn node_begins() {
    EVALUATING.fetch_add(1, Ordering::Relaxed);
}

/// It has ended.
#[inline]
pub(crate) fn node_ends() {
    // The order of these two and of those in `go` is total: one of the two threads sees what the other did.
    if EVALUATING.fetch_sub(1, Ordering::SeqCst) == 1 && POSTPONED.load(Ordering::SeqCst) {
        resume();
    }
}

/// Requests the scan that waited for a backward pass.
#[cold]
fn resume() {
    if POSTPONED.swap(false, Ordering::SeqCst)
        && let Some(process) = Process::if_started()
    {
        process.names.request(0);
    }
}

/// See the module.
pub(crate) struct Names {
    /// An event in backward requests a scan: none has since the last.
    is_armed: AtomicBool,
    /// The interpreter has been asked to call.
    asked: AtomicBool,
    /// Why ([`cause`]).
    causes: AtomicU8,
    /// The program has been seen to run backward, or an optimizer.
    trains: AtomicBool,
    /// An allocation has failed.
    failed: AtomicBool,
    /// Blocks freed, and at how many to scan; not exact where threads count at once.
    frees: AtomicU32,
    scan_at: AtomicU32,
    /// Where optimizers are stepped: hashes of the label and the stack. A new one is a change.
    sites: Box<[AtomicU64]>,
    new_site: AtomicBool,
    /// By a hash of the address, a bit: something was told of memory there, and nothing has been freed there since. Few, so that a free
    /// finds its own in the processor's nearest cache. Empty: switched off.
    told_of: Box<[AtomicU64]>,
    /// By the same hash: how often that ended.
    freed: Box<[AtomicU16]>,
    interface: OnceLock<Option<Interface>>,
    looking: AtomicBool,
    state: UnsafeCell<State>,
}

// SAFETY: `state` is used by whoever has set `looking`, the rest is atomic. Addresses of Python objects are numbers until somebody with
// the GIL has made sure that they are alive.
unsafe impl Sync for Names {}
// SAFETY: as above.
unsafe impl Send for Names {}

/// What is known from look to look.
#[derive(Default)]
struct State {
    torch: Option<Torch>,
    layout: Option<Layout>,
    /// The models and the optimizers; alive when they were last looked at.
    roots: Vec<Root>,
    optimizers: Vec<Known>,
    told: Told,
    /// By the object of a parameter that an optimizer has: its name. Where a parameter is taken out of its module for a while
    /// (FSDP does so) it keeps it.
    parameters: Parameters,
    /// How many tensors have been looked at in vain for a layout.
    misses: u32,
    schedule: Schedule,
    /// The modules that scans have seen, by their objects, and how many calls of modules have been compared with them.
    modules: HashSet<usize, Spreading>,
    calls_compared: usize,
    /// There are more models and optimizers than are remembered.
    has_too_many: bool,
    postponed: u32,
    is_verified: bool,
}

/// A Python object, by its address.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Known {
    object: usize,
    class: usize,
}

impl Known {
    /// # Safety
    /// An object.
    unsafe fn of(object: Object) -> Known {
        // SAFETY: as promised.
        Known { object: object.expose_provenance(), class: unsafe { python::type_of(object) }.addr() }
    }

    fn object(&self) -> Object {
        std::ptr::with_exposed_provenance_mut(self.object)
    }

    /// Whether it is still there: the garbage collector's list leads from it to its neighbours and back. What the memory of an object that
    /// is gone holds does not.
    fn is_alive(&self, memory: &CheckedMemory) -> bool {
        let links = self.object.wrapping_sub(LINKS);
        let link = |at: usize, which: usize| memory.size(at, which * 8).map(|word| word & !LINK_FLAGS);
        let neighbours = || {
            let (next, previous) = (link(links, 0)?, link(links, 1)?);
            let known = next != 0 && previous != 0 && memory.size(self.object, 8)? == self.class;
            Some(known && link(next, 1)? == links && link(previous, 0)? == links)
        };
        neighbours() == Some(true)
    }
}

fn place(address: u64) -> usize {
    ((address >> 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 49) as usize % PLACES
}

impl Names {
    pub(crate) fn new(on: bool) -> Names {
        Names {
            is_armed: AtomicBool::new(on),
            asked: AtomicBool::new(false),
            causes: AtomicU8::new(0),
            trains: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            frees: AtomicU32::new(0),
            scan_at: AtomicU32::new(FIRST_FREES),
            sites: (0..if on { MOST_SITES } else { 0 }).map(|_| AtomicU64::new(0)).collect(),
            new_site: AtomicBool::new(false),
            told_of: (0..if on { PLACES / 64 } else { 0 }).map(|_| AtomicU64::new(0)).collect(),
            freed: (0..if on { PLACES } else { 0 }).map(|_| AtomicU16::new(0)).collect(),
            interface: OnceLock::new(),
            looking: AtomicBool::new(false),
            state: UnsafeCell::new(State::default()),
        }
    }

    /// An event, which may be an occasion for a scan.
    #[inline(always)]
    pub(crate) fn note(&self, event: &Event) {
        match event.action {
            Action::FreeRequested => self.freed(event.addr),
            // Nothing requests these, and nothing defers them.
            Action::FreeCompleted if event.source == Source::TorchCpu => self.freed(event.addr),
            _ => {}
        }
        if event.flags.contains(Flags::IN_BACKWARD) && self.is_armed.load(Ordering::Relaxed) {
            self.request(cause::BACKWARD);
        }
        if matches!(event.action, Action::Oom) {
            self.failed.store(true, Ordering::Relaxed);
            self.request(cause::OOM);
        }
    }

    #[inline(always)]
    fn freed(&self, address: u64) {
        let place = place(address);
        let Some(told_of) = self.told_of.get(place / 64) else { return };
        if told_of.load(Ordering::Relaxed) >> (place % 64) & 1 != 0 {
            self.ends(place);
        }
        // Not exact where threads free at once.
        let frees = self.frees.load(Ordering::Relaxed).wrapping_add(1);
        self.frees.store(frees, Ordering::Relaxed);
        if frees == self.scan_at.load(Ordering::Relaxed) {
            self.request(cause::FREES);
        }
    }

    /// What was reported of memory at this place is over.
    #[cold]
    fn ends(&self, place: usize) {
        let Some((told_of, number)) = self.told_of.get(place / 64).zip(self.freed.get(place)) else { return };
        told_of.fetch_and(!(1 << (place % 64)), Ordering::SeqCst);
        number.fetch_add(1, Ordering::SeqCst);
    }

    /// An optimizer's step begins or ends on this thread; where it begins, with a hash of which it is.
    pub(crate) fn at_optimizer(&self, site: Option<u64>) {
        if let Some(site) = site {
            self.note_site(site | 1);
        }
        self.request(cause::OPTIMIZER);
    }

    fn note_site(&self, site: u64) {
        for place in &self.sites {
            match place.compare_exchange(0, site, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return self.new_site.store(true, Ordering::Relaxed),
                Err(known) if known == site => return,
                Err(_) => {}
            }
        }
    }

    /// Different optimizers that have been seen to be stepped.
    fn known_sites(&self) -> usize {
        self.sites.iter().take_while(|site| site.load(Ordering::Relaxed) != 0).count()
    }

    /// A module is called whose call is new. A program that trains has occasions enough.
    pub(crate) fn new_call(&self) {
        if self.is_on() && !self.trains.load(Ordering::Relaxed) {
            let soon = self.frees.load(Ordering::Relaxed).saturating_add(FREES_AFTER_CALL);
            if soon < self.scan_at.load(Ordering::Relaxed) {
                self.scan_at.store(soon, Ordering::Relaxed);
            }
        }
    }

    /// What is the same as long as nothing is freed at this address. To be read before something is reported of it.
    fn number_at(&self, address: u64) -> u16 {
        let place = place(address);
        let Some((told_of, number)) = self.told_of.get(place / 64).zip(self.freed.get(place)) else { return 0 };
        let bit = 1 << (place % 64);
        loop {
            told_of.fetch_or(bit, Ordering::SeqCst);
            let now = number.load(Ordering::SeqCst);
            // Where the bit is still there, whoever takes it away changes the number afterwards.
            if told_of.load(Ordering::SeqCst) & bit != 0 {
                return now;
            }
        }
    }

    fn is_on(&self) -> bool {
        !self.freed.is_empty() && self.scan_at.load(Ordering::Relaxed) != 0
    }

    fn switch_off(&self) {
        self.scan_at.store(0, Ordering::Relaxed);
        self.is_armed.store(false, Ordering::Relaxed);
    }

    /// Has the interpreter call [`scan`] when it can.
    #[cold]
    fn request(&self, causes: u8) {
        if causes & cause::TRAINING != 0 {
            self.trains.store(true, Ordering::Relaxed);
        }
        if !self.is_on() {
            return;
        }
        self.causes.fetch_or(causes, Ordering::AcqRel);
        if self.asked.swap(true, Ordering::AcqRel) {
            return;
        }
        self.is_armed.store(false, Ordering::Relaxed);
        let Some(interface) = self.interface.get_or_init(Interface::find) else { return self.switch_off() };
        if !interface.is_running() {
            return self.switch_off();
        }
        if !interface.call_soon(scan) {
            // The interpreter's queue is full.
            self.asked.store(false, Ordering::Release);
            self.request_at_next_free();
        }
    }

    /// The scan could not be made now: the next block that is freed requests it again.
    fn request_at_next_free(&self) {
        self.is_armed.store(true, Ordering::Relaxed);
        self.scan_at.store(self.frees.load(Ordering::Relaxed).wrapping_add(1).max(1), Ordering::Relaxed);
    }
}

/// Called by the interpreter on its main thread, with the GIL. Must return 0, or it raises.
unsafe extern "C" fn scan(_: *mut c_void) -> c_int {
    // SAFETY: errno is the thread's own.
    let errno = unsafe { *libc::__errno_location() };
    // In a forked child that has recorded nothing yet: its parent's affair.
    if let Some(process) = Process::if_started()
        && !process.names.looking.swap(true, Ordering::Acquire)
    {
        let names = &process.names;
        if names.asked.swap(false, Ordering::AcqRel) && names.is_on() {
            names.is_armed.store(true, Ordering::Relaxed);
            // SAFETY: `looking` makes this the only one.
            go(process, unsafe { &mut *names.state.get() });
        }
        names.looking.store(false, Ordering::Release);
    }
    // SAFETY: the thread's own, which outlives the call.
    unsafe { *libc::__errno_location() = errno };
    0
}

fn go(process: &'static Process, state: &mut State) {
    let names = &process.names;
    let start = clock::monotonic_ns();
    if is_evaluating() || thread(|t| t.backward_depth.get()) > 0 {
        // What is about to change is not scanned; the causes stay.
        return;
    }
    let causes = names.causes.swap(0, Ordering::AcqRel);
    let again = || {
        names.causes.fetch_or(causes, Ordering::AcqRel);
        names.request_at_next_free();
    };
    let Some(Some(interface)) = names.interface.get() else { return };
    // SAFETY: the interpreter calls with the GIL.
    let Some(session) = (unsafe { interface.session() }) else { return again() };
    let made = search(process, state, session, causes);
    process.count(Counter::NamesMicroseconds, clock::monotonic_ns().saturating_sub(start) / 1000);
    let frees = names.frees.load(Ordering::Relaxed);
    let next = match made {
        // Not yet: a model that is being built has no names, and PyTorch may not be there.
        Ok(Scan::Nothing) if causes & cause::FREES != 0 => frees.saturating_add(FIRST_FREES),
        Ok(Scan::Nothing) => return,
        Ok(_) => frees.saturating_mul(FREES_GROW).max(FIRST_FREES),
        Err(why) => {
            if let Some(mut guard) = Guard::enter() {
                guard.notice(TOPIC, Verdict::Off, &format!("no names of tensors and modules: {why}"));
            }
            return names.switch_off();
        }
    };
    names.scan_at.store(next, Ordering::Relaxed);
}

/// Whether a thread runs an autograd node. If so, the scan is requested again when the last of them ends.
fn is_evaluating() -> bool {
    POSTPONED.store(true, Ordering::SeqCst);
    let is_evaluating = EVALUATING.load(Ordering::SeqCst) > 0;
    // Where the last has ended meanwhile and requested the scan, it comes once more.
    if !is_evaluating {
        POSTPONED.store(false, Ordering::SeqCst);
    }
    is_evaluating
}

impl State {
    /// Forgets what is gone; whether anything is.
    fn forget_dead(&mut self) -> bool {
        let before = self.roots.len() + self.optimizers.len();
        if before == 0 {
            return false;
        }
        match CheckedMemory::open() {
            Ok(memory) => {
                self.roots.retain(|root| root.known.is_alive(&memory));
                self.optimizers.retain(|optimizer| optimizer.is_alive(&memory));
            }
            Err(_) => {
                self.roots.clear();
                self.optimizers.clear();
            }
        }
        self.roots.len() + self.optimizers.len() != before
    }

    /// Whether a module was called that no scan has seen, or an optimizer stepped where none had been.
    fn is_changed(&mut self, process: &Process) -> bool {
        let names = &process.names;
        let calls = &process.torch.nn_calls;
        let from = std::mem::replace(&mut self.calls_compared, calls.count());
        let is_new_module = calls.objects_from(from).any(|object| !self.modules.contains(&object));
        let is_new_site = names.new_site.swap(false, Ordering::Relaxed) && names.known_sites() > self.optimizers.len();
        is_new_module || is_new_site
    }
}

/// Whether this thread is in a Python function of this name. Its frames are read in place: asked for as objects they would stay such.
fn is_within(process: &Process, name: &str) -> bool {
    process.python().is_some_and(|python| python.is_within(name))
}

fn search(
    process: &'static Process,
    state: &mut State,
    session: Session<'_>,
    causes: u8,
) -> Result<Scan, &'static str> {
    let names = &process.names;
    let Some(module) = session.class(c"torch.nn.modules.module", c"Module") else { return Ok(Scan::Nothing) };
    let optimizer = session.class(c"torch.optim.optimizer", c"Optimizer");
    if state.torch.is_none() {
        state.torch = Some(Torch::find()?);
    }
    let trains = names.trains.load(Ordering::Relaxed);
    let events = process.segment.header().next_seq.0.load(Ordering::Relaxed);
    let changed = state.is_changed(process) || state.has_too_many;
    let scan = match state.schedule.decide(causes, Facts { events, changed }) {
        Scan::Nothing => return Ok(Scan::Nothing),
        // What comes in the place of a model that is gone is not known.
        Scan::Known if state.forget_dead() => {
            state.schedule.decide(0, Facts { events, changed: true }).max(Scan::Known)
        }
        scan => scan,
    };
    let all = scan == Scan::All;
    let can_wait = !trains && !names.failed.load(Ordering::Relaxed) && state.postponed < MOST_POSTPONED;
    if all && can_wait && is_within(process, "__init__") {
        // A model that is being built has no names yet.
        state.postponed += 1;
        return Ok(Scan::Nothing);
    }
    let Some(_uncollected) = session.uncollected() else { return Err("the garbage collector cannot be held off") };
    let (mut modules, mut optimizers) = (Vec::new(), Vec::new());
    if all {
        let classes = [module, optimizer.unwrap_or(module)];
        let lists = Guard::enter().and_then(|mut guard| hooks::collector_lists(&mut guard));
        let sought = session.instances(&classes, lists, &mut |which, object| {
            if which == 0 { modules.push(object) } else { optimizers.push(object) }
        });
        if !sought {
            return Err("the garbage collector's objects cannot be listed");
        }
        state.schedule.made_full(events, trains);
        state.modules = modules.iter().map(|module| module.addr()).collect();
    }
    let seq = process.segment.header().next_seq.0.load(Ordering::Relaxed).saturating_sub(1);
    let cpu = match process.options.cpu {
        Cpu::Always => true,
        Cpu::Auto => !hooks::is_device_in_use(),
        Cpu::Never => false,
    };
    let State {
        torch,
        layout,
        roots,
        optimizers: known_optimizers,
        told,
        parameters,
        misses,
        modules: scanned,
        has_too_many,
        ..
    } = state;
    let Some(torch) = torch else { return Ok(Scan::Nothing) };
    told.begin(names);
    let had_layout = layout.is_some();
    let mut walk =
        Walk::new(session, torch, layout, module, cpu, told, parameters).ok_or("the interpreter has no memory")?;
    if all {
        // SAFETY: objects, as the interpreter has just listed them.
        let known = |objects: Vec<Object>| objects.into_iter().map(|o| unsafe { Known::of(o) }).collect();
        let found = walk.roots(&modules);
        let before = std::mem::take(roots);
        *roots = roots::named(session, &mut walk, &found, before);
        *known_optimizers = known(optimizers);
    }
    let mut pass = |walk: &mut Walk<'_, '_>| {
        roots.retain(|root| {
            let before = walk.tensors_seen;
            walk.root(root.known.object(), &root.name);
            // A loss function and its like: nothing to come back for.
            walk.tensors_seen != before
        });
        known_optimizers.iter().for_each(|optimizer| walk.optimizer(optimizer.object()));
    };
    pass(&mut walk);
    if !had_layout && walk.has_layout() {
        // It was found on the way: what came before it has not been told.
        walk.begin_again();
        pass(&mut walk);
    }
    let (refused, cut) = (walk.refused, walk.cut);
    *misses += walk.misses;
    let too_many = *misses >= MOST_MISSES && !walk.has_layout();
    let (now_called, seen) = walk.end();
    *parameters = now_called;
    scanned.extend(seen);
    if scanned.len() > MOST_MODULES {
        scanned.clear();
    }
    *has_too_many = roots.len() + known_optimizers.len() > MOST_KNOWN;
    if *has_too_many {
        roots.clear();
        known_optimizers.clear();
    }
    process.count(Counter::NamesCut, cut);
    if let Some(why) = refused {
        return Err(why);
    }
    if too_many {
        return Err("no tensor is laid out as expected");
    }
    let is_verified = layout.is_some();
    state.tell(process, seq, is_verified);
    Ok(scan)
}

impl State {
    /// Sends what is new.
    fn tell(&mut self, process: &Process, seq: u64, is_verified: bool) {
        let news = std::mem::take(&mut self.told.news);
        let cut_names = std::mem::take(&mut self.told.cut);
        process.count(Counter::NamesCut, cut_names);
        if news.is_empty() && (self.is_verified || !is_verified) {
            return;
        }
        let Some(mut guard) = Guard::enter() else { return self.told.before.clear() };
        if is_verified && !std::mem::replace(&mut self.is_verified, true) {
            guard.notice(
                TOPIC,
                Verdict::Works,
                "TensorImpl and StorageImpl verified: their memory is where PyTorch says",
            );
        }
        for news in &news {
            match news {
                News::Module { object, class, path } => {
                    let (class, name) = (cut(process, class), cut(process, path));
                    guard.define(&Definition::NnName { object: *object, seq, class, name });
                }
                News::Tensor { address, kind, name, shape } => {
                    let (name, shape) = (cut(process, name), cut(process, shape));
                    guard.define(&Definition::TensorName { address: *address, seq, kind: *kind, name, shape });
                }
            }
        }
    }
}

/// What has been told, and what is to be.
#[derive(Default)]
struct Told {
    /// By a hash of what it is, its name and its address: the number that belonged to the address ([`Names::number_at`]).
    before: HashMap<u64, u16, Spreading>,
    /// Of the recording that this belongs to.
    names: Option<&'static Names>,
    news: Vec<News>,
    bytes: usize,
    cut: u64,
}

enum News {
    Module { object: u64, class: Box<str>, path: Box<str> },
    Tensor { address: u64, kind: TensorKind, name: Box<str>, shape: Box<str> },
}

impl Told {
    fn begin(&mut self, names: &'static Names) {
        self.names = Some(names);
        if self.before.len() > MOST_REMEMBERED {
            self.before.clear();
        }
    }

    /// Whether this is news, and there is room for it.
    fn is_new(&mut self, key: impl Hash, number: u16, bytes: usize) -> bool {
        let mut hash = Spread::default();
        key.hash(&mut hash);
        if self.before.insert(hash.finish(), number) == Some(number) {
            return false;
        }
        let is_room = self.bytes + bytes <= MOST_BYTES;
        if is_room {
            self.bytes += bytes;
        } else {
            self.cut += 1;
        }
        is_room
    }
}

impl Listener for Told {
    fn module(&mut self, object: Object, class: &str, path: &str) {
        let object = object.addr() as u64;
        if self.is_new((object, class, path), 0, NEWS + class.len() + path.len()) {
            self.news.push(News::Module { object, class: class.into(), path: path.into() });
        }
    }

    fn tensor(&mut self, kind: TensorKind, name: &str, address: u64, shape: &dyn Fn() -> String) {
        let number = self.names.map_or(0, |names| names.number_at(address));
        if self.is_new((kind, name, address), number, NEWS + name.len()) {
            self.news.push(News::Tensor { address, kind, name: name.into(), shape: shape().into() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_freed_is_told_again_and_nothing_else() {
        let names = Names::new(true);
        let addresses: Vec<u64> = (0..500).map(|n| 0x7f00_0000_0000 + n * 0x600).collect();
        let numbers: Vec<u16> = addresses.iter().map(|address| names.number_at(*address)).collect();
        let freed = |n: usize| n.is_multiple_of(7);
        for round in 1..4 {
            addresses.iter().enumerate().filter(|(n, _)| freed(*n)).for_each(|(_, address)| {
                // Whatever comes and goes there after the first time has not been told of.
                (0..round).for_each(|_| names.freed(*address));
            });
            let now: Vec<u16> = addresses.iter().map(|address| names.number_at(*address)).collect();
            let changed = |n: usize| now.get(n) != numbers.get(n);
            assert!((0..addresses.len()).filter(|n| freed(*n)).all(changed), "round {round}");
            // Two addresses may have one place.
            let others = (0..addresses.len()).filter(|n| !freed(*n) && changed(*n)).count();
            assert!(others < 20, "round {round}: {others} others");
        }
        assert_eq!(Names::new(false).number_at(0x1000), 0);
    }
}
