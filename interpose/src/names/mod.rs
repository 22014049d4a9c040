//! Tensor names: what the program calls its tensors and modules.
//!
//! Examples are `layer1.0.conv1.weight`, its `.grad`, and `Adam.exp_avg of layer1.0.conv1.weight`. Only the program's
//! own objects hold these names. A pending call (`Py_AddPendingCall`) reads them between two Python instructions, while
//! its thread holds the GIL.
//!
//! Constraints: a scan runs no Python code and keeps no object. It changes a reference count only for the duration of a
//! read.
//!
//! The garbage collector's lists contain every `nn.Module` and every optimizer. A module that no other module contains
//! is a model. This heap scan takes milliseconds, so later scans visit only the models that it found. An object is
//! still alive if both of its neighbors in the collector's list link to it.
//!
//! A scan is requested on these occasions:
//! - after a backward pass, when the gradients exist;
//! - around an optimizer step, when the optimizer state exists;
//! - when an allocation fails;
//! - when the program calls a module or an optimizer that no scan has seen;
//! - in a program that does none of these, after it has freed 16, 128, 1024 ... blocks.
//!
//! [`schedule`] decides which requests are served. It counts occasions and never reads a clock. A name is reported
//! again only for other memory: every free increments a number that belongs to a hash of the address.

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

/// A program without a backward pass is first scanned after `FIRST_FREES` freed blocks. Each later threshold is
/// `FREES_GROW` times larger.
const FIRST_FREES: u32 = 16;
const FREES_GROW: u32 = 8;
/// In a program that does not train, the first call of an unknown module schedules a scan after this many freed blocks.
/// By then the program has called all modules of the model, or a backward pass has run.
const FREES_AFTER_CALL: u32 = 128;
/// How many scans are postponed at most because a constructor is running.
const MOST_POSTPONED: u32 = 16;
/// At most this many optimizers are distinguished by the place of their `step()` call.
const MOST_SITES: usize = 64;
/// At most this many modules are remembered as scanned.
const MOST_MODULES: usize = 1 << 16;
const TOPIC: &str = "torch.names";
/// At most this many models and optimizers are scanned again. In a program with more, every scan is a heap scan.
const MOST_KNOWN: usize = 256;
/// After this many device tensors that do not confirm the layout, name reading is switched off.
const MOST_MISSES: u32 = 256;
/// Bytes that a pending name occupies beside its text.
const NEWS: usize = 32;
/// Upper bound on the bytes of pending names.
const MOST_BYTES: usize = 64 << 20;
/// At most this many reported names are remembered.
const MOST_REMEMBERED: usize = 1 << 19;
/// Number of hash slots for addresses.
const PLACES: usize = 1 << 15;
/// Size in bytes of `PyGC_Head`, the collector's two words in front of an object.
const LINKS: usize = 16;
/// The low bits of the collector's links hold flags.
const LINK_FLAGS: usize = 3;

/// How many threads are running an autograd node. Shared by all recordings of this loaded library.
static EVALUATING: AtomicU32 = AtomicU32::new(0);
/// Set while a scan waits until no thread runs an autograd node.
static POSTPONED: AtomicBool = AtomicBool::new(false);

/// Reports that an autograd node begins to run on the calling thread.
#[inline]
pub(crate) fn node_begins() {
    EVALUATING.fetch_add(1, Ordering::Relaxed);
}

/// Reports that an autograd node has ended on the calling thread. The last one to end requests a postponed scan.
#[inline]
pub(crate) fn node_ends() {
    // These two accesses and the two in `is_evaluating` are in one total order (`SeqCst`). So one of the two threads
    // sees the other's write.
    if EVALUATING.fetch_sub(1, Ordering::SeqCst) == 1 && POSTPONED.load(Ordering::SeqCst) {
        resume();
    }
}

/// Requests the scan that waited for the end of a backward pass.
#[cold]
fn resume() {
    if POSTPONED.swap(false, Ordering::SeqCst)
        && let Some(process) = Process::if_started()
    {
        process.names.request(0);
    }
}

/// The state of tensor names in one recording.
pub(crate) struct Names {
    /// Set if the next event in a backward pass requests a scan. Cleared by that request.
    is_armed: AtomicBool,
    /// Set while a pending call is queued in the interpreter.
    asked: AtomicBool,
    /// The reasons for the requested scan, a set of bits ([`cause`]).
    causes: AtomicU8,
    /// Set once the program has run a backward pass or an optimizer step.
    trains: AtomicBool,
    /// Set once an allocation has failed.
    failed: AtomicBool,
    /// Blocks freed so far. Not exact, because threads increment it without synchronization.
    frees: AtomicU32,
    scan_at: AtomicU32,
    /// Hashes of label and stack, one for each place that steps an optimizer. 0 is a free slot. A new hash counts as a
    /// change.
    sites: Box<[AtomicU64]>,
    new_site: AtomicBool,
    /// One bit for each hash slot of addresses. A set bit means that a name of memory in this slot was reported and no
    /// block in it was freed since. The bitmap is small, so that a free finds its word in the processor's L1 cache.
    /// Empty if tensor names are switched off.
    told_of: Box<[AtomicU64]>,
    /// For each hash slot, how often a free has cleared its bit.
    freed: Box<[AtomicU16]>,
    interface: OnceLock<Option<Interface>>,
    looking: AtomicBool,
    state: UnsafeCell<State>,
}

// SAFETY: only the thread that has set `looking` uses `state`, and all other fields are atomic. The addresses of Python
// objects are plain numbers. `scan` dereferences them only with the GIL, after it has checked that the objects are
// alive.
unsafe impl Sync for Names {}
// SAFETY: only the thread that has set `looking` uses `state`. The addresses of Python objects in it are plain numbers
// and belong to no thread.
unsafe impl Send for Names {}

/// What one scan keeps for the next.
#[derive(Default)]
struct State {
    torch: Option<Torch>,
    layout: Option<Layout>,
    /// The models. They were alive at the last scan.
    roots: Vec<Root>,
    optimizers: Vec<Known>,
    told: Told,
    /// Maps the object of each parameter that an optimizer has to its name. A parameter that is temporarily outside its
    /// module (FSDP moves them) keeps its name.
    parameters: Parameters,
    /// How many tensors did not confirm the layout.
    misses: u32,
    schedule: Schedule,
    /// The objects of the modules that scans have seen.
    modules: HashSet<usize, Spreading>,
    calls_compared: usize,
    /// Set if there are more models and optimizers than [`MOST_KNOWN`].
    has_too_many: bool,
    postponed: u32,
    is_verified: bool,
}

/// A Python object, identified by its address and its type.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Known {
    object: usize,
    class: usize,
}

impl Known {
    /// # Safety
    ///
    /// `object` points to a live Python object, and the calling thread holds the GIL.
    unsafe fn of(object: Object) -> Known {
        // SAFETY: the caller guarantees that `object` is alive, so its type can be read.
        Known { object: object.expose_provenance(), class: unsafe { python::type_of(object) }.addr() }
    }

    fn object(&self) -> Object {
        std::ptr::with_exposed_provenance_mut(self.object)
    }

    /// Whether the object is still alive: the garbage collector's list links it with both neighbors, and its type is
    /// unchanged. The memory of a freed object does not satisfy this.
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
    /// `on` says whether the options request tensor names. Otherwise the tables are empty and take no memory.
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

    /// Takes note of an event that is about to be written. Some events request a scan.
    #[inline(always)]
    pub(crate) fn note(&self, event: &Event) {
        match event.action {
            Action::FreeRequested => self.freed(event.addr),
            // The CPU allocator has no separate free request and does not defer frees.
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
        // Two threads that free at the same time may lose an increment. Only the time of a scan depends on this
        // counter.
        let frees = self.frees.load(Ordering::Relaxed).wrapping_add(1);
        self.frees.store(frees, Ordering::Relaxed);
        if frees == self.scan_at.load(Ordering::Relaxed) {
            self.request(cause::FREES);
        }
    }

    /// Marks the names of memory in this hash slot as outdated.
    #[cold]
    fn ends(&self, place: usize) {
        let Some((told_of, number)) = self.told_of.get(place / 64).zip(self.freed.get(place)) else { return };
        told_of.fetch_and(!(1 << (place % 64)), Ordering::SeqCst);
        number.fetch_add(1, Ordering::SeqCst);
    }

    /// Reports that an optimizer step begins or ends on this thread. `site` is a hash of the optimizer's label and
    /// stack at the beginning, `None` at the end.
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

    /// How many different places have stepped an optimizer.
    fn known_sites(&self) -> usize {
        self.sites.iter().take_while(|site| site.load(Ordering::Relaxed) != 0).count()
    }

    /// Reports the first call of a module. Only a program that does not train needs the earlier scan that this
    /// schedules.
    pub(crate) fn new_call(&self) {
        if self.is_on() && !self.trains.load(Ordering::Relaxed) {
            let soon = self.frees.load(Ordering::Relaxed).saturating_add(FREES_AFTER_CALL);
            if soon < self.scan_at.load(Ordering::Relaxed) {
                self.scan_at.store(soon, Ordering::Relaxed);
            }
        }
    }

    /// A number that does not change while no block at this address is freed. Read it before reporting a name of memory
    /// at the address.
    fn number_at(&self, address: u64) -> u16 {
        let place = place(address);
        let Some((told_of, number)) = self.told_of.get(place / 64).zip(self.freed.get(place)) else { return 0 };
        let bit = 1 << (place % 64);
        loop {
            told_of.fetch_or(bit, Ordering::SeqCst);
            let now = number.load(Ordering::SeqCst);
            // If the bit is still set, the thread that clears it increments the number afterwards.
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

    /// Queues a pending call, in which the interpreter calls [`scan`].
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
            // The interpreter's queue of pending calls is full.
            self.asked.store(false, Ordering::Release);
            self.request_at_next_free();
        }
    }

    /// Schedules a new request at the next free, because the scan is not possible now.
    fn request_at_next_free(&self) {
        self.is_armed.store(true, Ordering::Relaxed);
        self.scan_at.store(self.frees.load(Ordering::Relaxed).wrapping_add(1).max(1), Ordering::Relaxed);
    }
}

/// The interpreter calls this function on its main thread, with the GIL. A result other than 0 would raise an
/// exception.
unsafe extern "C" fn scan(_: *mut c_void) -> c_int {
    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the thread.
    let errno = unsafe { *libc::__errno_location() };
    // `None` in a forked child that has recorded nothing yet: the request belongs to its parent.
    if let Some(process) = Process::if_started()
        && !process.names.looking.swap(true, Ordering::Acquire)
    {
        let names = &process.names;
        if names.asked.swap(false, Ordering::AcqRel) && names.is_on() {
            names.is_armed.store(true, Ordering::Relaxed);
            // SAFETY: this thread has set `looking`, so no other thread accesses `state` until it clears it.
            go(process, unsafe { &mut *names.state.get() });
        }
        names.looking.store(false, Ordering::Release);
    }
    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the thread.
    unsafe { *libc::__errno_location() = errno };
    0
}

fn go(process: &'static Process, state: &mut State) {
    let names = &process.names;
    let start = clock::monotonic_ns();
    if is_evaluating() || thread(|t| t.backward_depth.get()) > 0 {
        // A running backward pass is about to change gradients. The causes stay set for the scan that `resume`
        // requests.
        return;
    }
    let causes = names.causes.swap(0, Ordering::AcqRel);
    let again = || {
        names.causes.fetch_or(causes, Ordering::AcqRel);
        names.request_at_next_free();
    };
    let Some(Some(interface)) = names.interface.get() else { return };
    // SAFETY: the interpreter makes pending calls with the GIL, and this function does not release it.
    let Some(session) = (unsafe { interface.session() }) else { return again() };
    let made = search(process, state, session, causes);
    process.count(Counter::NamesMicroseconds, clock::monotonic_ns().saturating_sub(start) / 1000);
    let frees = names.frees.load(Ordering::Relaxed);
    let next = match made {
        // Nothing to scan yet: a model under construction has no names, and PyTorch may not be imported.
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

/// Whether any thread runs an autograd node. If so, the last of them requests the scan again when it ends.
fn is_evaluating() -> bool {
    POSTPONED.store(true, Ordering::SeqCst);
    let is_evaluating = EVALUATING.load(Ordering::SeqCst) > 0;
    // If the last node has ended in between, its thread may have requested one more scan. That costs time and changes
    // no result.
    if !is_evaluating {
        POSTPONED.store(false, Ordering::SeqCst);
    }
    is_evaluating
}

impl State {
    /// Forgets models and optimizers that no longer exist. Returns whether there were any.
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

    /// Whether a module was called that no scan has seen, or an optimizer was stepped at a new place.
    fn is_changed(&mut self, process: &Process) -> bool {
        let names = &process.names;
        let calls = &process.torch.nn_calls;
        let from = std::mem::replace(&mut self.calls_compared, calls.count());
        let is_new_module = calls.objects_from(from).any(|object| !self.modules.contains(&object));
        let is_new_site = names.new_site.swap(false, Ordering::Relaxed) && names.known_sites() > self.optimizers.len();
        is_new_module || is_new_site
    }
}

/// Whether this thread is inside a Python function of this name. The frames are read in place, because CPython would
/// materialize frame objects that outlive the request.
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
    let scan = state.schedule.decide(causes, Facts { events, changed });
    if scan == Scan::Nothing {
        return Ok(Scan::Nothing);
    }
    // Before anything reads the known objects: those that are gone must not be touched.
    let scan = if state.forget_dead() {
        // The objects that replace them are unknown.
        state.schedule.decide(0, Facts { events, changed: true }).max(scan)
    } else {
        scan
    };
    let all = scan == Scan::All;
    let can_wait = !trains && !names.failed.load(Ordering::Relaxed) && state.postponed < MOST_POSTPONED;
    if all && can_wait && is_within(process, "__init__") {
        // A model under construction has no names yet.
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
        // SAFETY: the interpreter has just listed these objects, and this thread holds the GIL.
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
            // Forgets modules without tensors, such as loss functions.
            walk.tensors_seen != before
        });
        known_optimizers.iter().for_each(|optimizer| walk.optimizer(optimizer.object()));
    };
    pass(&mut walk);
    if !had_layout && walk.has_layout() {
        // The layout was confirmed during this pass, so the tensors before that point have not been reported.
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
    /// Writes the pending names to the ring.
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

/// The names that were reported and those that are pending.
#[derive(Default)]
struct Told {
    /// Maps a hash of kind, name and address to the number that the address had ([`Names::number_at`]).
    before: HashMap<u64, u16, Spreading>,
    /// The tensor names of the current recording.
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

    /// Whether this name is new and fits into [`MOST_BYTES`].
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
                // Only the first free after a report matters. Later allocations and frees at the address concern memory
                // that was not reported.
                (0..round).for_each(|_| names.freed(*address));
            });
            let now: Vec<u16> = addresses.iter().map(|address| names.number_at(*address)).collect();
            let changed = |n: usize| now.get(n) != numbers.get(n);
            assert!((0..addresses.len()).filter(|n| freed(*n)).all(changed), "round {round}");
            // Two addresses may share a hash slot.
            let others = (0..addresses.len()).filter(|n| !freed(*n) && changed(*n)).count();
            assert!(others < 20, "round {round}: {others} others");
        }
        assert_eq!(Names::new(false).number_at(0x1000), 0);
    }
}
