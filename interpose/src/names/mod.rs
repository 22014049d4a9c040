//! What the program calls its tensors and modules: `layer1.0.conv1.weight`, its `.grad`, `Adam.exp_avg of layer1.0.conv1.weight`.
//!
//! Only the program's own objects know. They are read where the interpreter is between two instructions and holds the GIL
//! (`Py_AddPendingCall`, as in [`crate::origins`]): no Python code runs, nothing is made or kept, no reference count is changed beyond the look. The
//! garbage collector's list shows all `nn.Module`s and optimizers there are; a module that no other holds is a model. That look
//! at all objects takes milliseconds, so the models it found are looked at again without it: an object that its two
//! neighbours in the collector's list still name is alive.
//!
//! *When*: after a backward pass (the gradients are there), around an optimizer's step (so is what it keeps), at an error for want of memory, and, in a
//! program that does none of these, once it has freed 16, 128, 1024 ... blocks. *How often*: four times, or until looks have taken 3 ms; from then on
//! they take at most a thousandth of the time that passed, and become rarer as a run gets longer. What has been told is told again only of other memory: freeing a block
//! changes a number by its address.

mod python;
mod roots;
mod tensors;
mod walk;

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::hash::{Hash, Hasher};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};

use memtrace_trace::clock;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, TensorKind, Verdict};
use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::options::Cpu;

pub(crate) use self::python::type_name;
use self::python::{Interface, Object, Session};
use self::roots::Root;
use self::tensors::{Layout, Torch};
use self::walk::{Listener, Parameters, Spread, Spreading, Walk};
use crate::emit::cut;
use crate::guard::Guard;
use crate::hooks;
use crate::process::Process;
use crate::stack::CheckedMemory;
use crate::thread::thread;

/// How many looks there may be at first whatever they take, what they may take at first, in nanoseconds, and from then on: one part in so
/// many of the time that passed.
const FIRST_LOOKS: u32 = 4;
const ALLOWANCE_NS: u64 = 3_000_000;
const PART: u64 = 1000;
/// The next look comes not before one part in so many of the time since the first has passed: their number grows with its logarithm.
const SPARSE: u64 = 256;
/// Blocks freed when a program without a backward pass is first looked at, and by what that grows.
const FIRST_FREES: u32 = 16;
const FREES_GROW: u32 = 8;
/// How often a look waits for a constructor to end.
const MOST_POSTPONED: u32 = 16;
/// All objects are looked at again when so many times as long as that took has passed, and not within this time; sooner where a model is gone.
const ALL_PART: u64 = 2000;
const ALL_AGAIN_NS: u64 = 2_000_000_000;
const STALE_PART: u64 = 200;
/// Outside of backward, once the first looks are over.
const OUTSIDE_NS: u64 = 1_000_000_000;
const TOPIC: &str = "torch.names";
/// Models and optimizers that are looked at again, at most; a program with more has them looked for each time.
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

/// An autograd node begins to run on this thread.
#[inline]
pub(crate) fn node_begins() {
    EVALUATING.fetch_add(1, Ordering::Relaxed);
}

/// It has ended.
#[inline]
pub(crate) fn node_ends() {
    EVALUATING.fetch_sub(1, Ordering::Relaxed);
}

/// See the module.
pub(crate) struct Names {
    /// From when on an event outside of backward, and one in backward, asks for a look; in ticks.
    due: AtomicU64,
    due_in_backward: AtomicU64,
    /// The interpreter has been asked to call.
    asked: AtomicBool,
    /// The program has been seen to run backward, or an optimizer.
    trains: AtomicBool,
    /// Memory was wanting.
    failed: AtomicBool,
    /// Blocks freed, and at how many to look; not exact where threads count at once.
    frees: AtomicU32,
    look_at: AtomicU32,
    /// By a hash of the address, a bit: something was told of memory there, and nothing has been freed there since. Few, so that a free
    /// finds its own in the processor's nearest cache. Empty: switched off.
    told_of: Box<[AtomicU64]>,
    /// By the same hash: how often that ended.
    freed: Box<[AtomicU16]>,
    /// When this was made: ticks and nanoseconds.
    since: (u64, u64),
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
    /// How many looks there were at known models.
    looks: u32,
    /// In nanoseconds: when the first look was, when all objects were last looked at, what looks have taken and what the last took, what the
    /// last look at all objects took.
    began: u64,
    all_at: u64,
    spent: u64,
    cost: u64,
    cost_of_all: u64,
    /// All objects have been looked at; and since the program was first seen to train.
    seen_all: bool,
    seen_training: bool,
    /// A model has gone.
    is_stale: bool,
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
            due: AtomicU64::new(u64::MAX),
            due_in_backward: AtomicU64::new(if on { 0 } else { u64::MAX }),
            asked: AtomicBool::new(false),
            trains: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            frees: AtomicU32::new(0),
            look_at: AtomicU32::new(FIRST_FREES),
            told_of: (0..if on { PLACES / 64 } else { 0 }).map(|_| AtomicU64::new(0)).collect(),
            freed: (0..if on { PLACES } else { 0 }).map(|_| AtomicU16::new(0)).collect(),
            since: (clock::now(), clock::monotonic_ns()),
            interface: OnceLock::new(),
            looking: AtomicBool::new(false),
            state: UnsafeCell::new(State::default()),
        }
    }

    /// An event, for when to look.
    #[inline(always)]
    pub(crate) fn note(&self, event: &Event) {
        if matches!(event.action, Action::FreeRequested | Action::FreeCompleted) {
            self.freed(event.addr);
        }
        let in_backward = event.flags.contains(Flags::IN_BACKWARD);
        let due = if in_backward { &self.due_in_backward } else { &self.due };
        if event.ticks >= due.load(Ordering::Relaxed) {
            self.ask(in_backward);
        }
        if matches!(event.action, Action::Oom) {
            self.fails(in_backward);
        }
    }

    /// There is no memory: it may be the last that is heard of the program.
    #[cold]
    fn fails(&self, in_backward: bool) {
        self.failed.store(true, Ordering::Relaxed);
        self.ask(in_backward);
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
        if frees == self.look_at.load(Ordering::Relaxed) {
            self.ask(false);
        }
    }

    /// What was told of memory at this place is over.
    #[cold]
    fn ends(&self, place: usize) {
        let Some((told_of, number)) = self.told_of.get(place / 64).zip(self.freed.get(place)) else { return };
        told_of.fetch_and(!(1 << (place % 64)), Ordering::SeqCst);
        number.fetch_add(1, Ordering::SeqCst);
    }

    /// An optimizer's step begins or ends on this thread.
    pub(crate) fn at_optimizer(&self) {
        if clock::now() >= self.due_in_backward.load(Ordering::Relaxed) {
            self.ask(true);
        }
    }

    /// What is the same as long as nothing is freed at this address. To be asked before something is told of it.
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
        !self.freed.is_empty() && self.look_at.load(Ordering::Relaxed) != 0
    }

    fn switch_off(&self) {
        self.look_at.store(0, Ordering::Relaxed);
        self.wait_until(u64::MAX, u64::MAX);
    }

    fn wait_until(&self, due: u64, due_in_backward: u64) {
        self.due.store(due, Ordering::Relaxed);
        self.due_in_backward.store(due_in_backward, Ordering::Relaxed);
    }

    /// Lets events ask again when so many nanoseconds have passed, those outside of backward and those in it.
    fn wait(&self, wait: u64, wait_in_backward: u64) {
        let (ticks, ns) = (clock::now(), clock::monotonic_ns());
        let rate = |count: u64| {
            let passed = (ns.saturating_sub(self.since.1)).max(1);
            (u128::from(count) * u128::from(ticks.saturating_sub(self.since.0)) / u128::from(passed)) as u64
        };
        self.wait_until(ticks.saturating_add(rate(wait)), ticks.saturating_add(rate(wait_in_backward)));
    }

    /// Has the interpreter call [`look`] when it can.
    #[cold]
    fn ask(&self, trains: bool) {
        if trains {
            self.trains.store(true, Ordering::Relaxed);
        }
        if !self.is_on() || self.asked.swap(true, Ordering::AcqRel) {
            return;
        }
        self.wait_until(u64::MAX, u64::MAX);
        let Some(interface) = self.interface.get_or_init(Interface::find) else { return self.switch_off() };
        if !interface.is_running() {
            return self.switch_off();
        }
        if !interface.call_soon(look) {
            // Too many others wait: asked again at the next event.
            self.asked.store(false, Ordering::Release);
            self.wait_until(0, 0);
        }
    }
}

/// Called by the interpreter on its main thread, with the GIL. Must return 0, or it raises.
unsafe extern "C" fn look(_: *mut c_void) -> c_int {
    // SAFETY: errno is the thread's own.
    let errno = unsafe { *libc::__errno_location() };
    // In a forked child that has recorded nothing yet: its parent's affair.
    if let Some(process) = Process::if_started()
        && !process.names.looking.swap(true, Ordering::Acquire)
    {
        let names = &process.names;
        if names.asked.swap(false, Ordering::AcqRel) && names.is_on() {
            // SAFETY: `looking` makes this the only one.
            go(process, unsafe { &mut *names.state.get() });
        }
        names.looking.store(false, Ordering::Release);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    0
}

/// What came of a look.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Looked {
    /// It was not the time for it.
    Nothing,
    /// At the models that were known.
    Known,
    /// At all objects.
    All,
}

fn go(process: &'static Process, state: &mut State) {
    let names = &process.names;
    let start = clock::monotonic_ns();
    if thread(|t| t.backward_depth.get()) > 0 || EVALUATING.load(Ordering::Relaxed) > 0 {
        // What is about to change is not looked at. The events that follow ask again.
        return names.wait(1_000_000, 0);
    }
    let Some(Some(interface)) = names.interface.get() else { return };
    // SAFETY: the interpreter calls with the GIL.
    let Some(session) = (unsafe { interface.session() }) else { return };
    let uncollected = session.uncollected();
    if state.began == 0 {
        state.began = start;
    }
    let looked = match uncollected {
        Some(_) => search(process, state, session, start),
        None => Err("the garbage collector cannot be held off"),
    };
    drop(uncollected);
    let now = clock::monotonic_ns();
    let took = now.saturating_sub(start);
    process.count(Counter::NamesMicroseconds, took / 1000);
    match looked {
        Ok(Looked::Nothing) => return names.wait(50_000_000, 1_000_000),
        Ok(Looked::Known) => {
            state.cost = took;
            state.spent += took;
            state.looks = state.looks.saturating_add(1);
        }
        Ok(Looked::All) => (state.cost_of_all, state.all_at) = (took, start),
        Err(why) => {
            if let Some(mut guard) = Guard::enter() {
                guard.notice(TOPIC, Verdict::Off, &format!("no names of tensors and modules: {why}"));
            }
            return names.switch_off();
        }
    }
    let frees = names.frees.load(Ordering::Relaxed);
    names.look_at.store(frees.saturating_mul(FREES_GROW).max(FIRST_FREES), Ordering::Relaxed);
    let (wait, wait_in_backward) = state.pause(now);
    names.wait(wait, wait_in_backward);
}

impl State {
    /// How long to wait for the next look, outside of backward and in it.
    fn pause(&self, now: u64) -> (u64, u64) {
        let passed = now.saturating_sub(self.began);
        let over = (self.spent + self.cost).saturating_sub(ALLOWANCE_NS).saturating_mul(PART);
        let is_first = self.looks < FIRST_LOOKS || over == 0;
        let rationed = if is_first { 0 } else { over.saturating_sub(passed) };
        let least = rationed.max(passed / SPARSE);
        let outside = if is_first { self.cost * 20 } else { OUTSIDE_NS };
        (least.max(outside), least.max(self.cost * 4))
    }

    /// Whether to look at all objects.
    fn is_time_for_all(&self, now: u64, trains: bool) -> bool {
        let passed = now.saturating_sub(self.all_at);
        !self.seen_all
            || (trains && !self.seen_training)
            || (self.is_stale && passed >= self.cost_of_all.saturating_mul(STALE_PART))
            || passed >= self.cost_of_all.saturating_mul(ALL_PART).max(ALL_AGAIN_NS)
    }

    /// Forgets what is gone.
    fn forget_dead(&mut self) {
        if self.roots.is_empty() && self.optimizers.is_empty() {
            return;
        }
        let before = self.roots.len();
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
        self.is_stale |= self.roots.len() != before;
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
    now: u64,
) -> Result<Looked, &'static str> {
    let names = &process.names;
    let Some(module) = session.class(c"torch.nn.modules.module", c"Module") else { return Ok(Looked::Nothing) };
    let optimizer = session.class(c"torch.optim.optimizer", c"Optimizer");
    if state.torch.is_none() {
        state.torch = Some(Torch::find()?);
    }
    state.forget_dead();
    let trains = names.trains.load(Ordering::Relaxed);
    let all = state.is_time_for_all(now, trains);
    let can_wait = !trains && !names.failed.load(Ordering::Relaxed) && state.postponed < MOST_POSTPONED;
    if all && can_wait && is_within(process, "__init__") {
        // A model that is being built has no names yet.
        state.postponed += 1;
        return Ok(Looked::Nothing);
    }
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
        state.seen_all = true;
        state.seen_training = trains;
        state.is_stale = false;
    }
    let seq = process.segment.header().next_seq.0.load(Ordering::Relaxed).saturating_sub(1);
    let cpu = match process.options.cpu {
        Cpu::Always => true,
        Cpu::Auto => !hooks::is_device_in_use(),
        Cpu::Never => false,
    };
    let State { torch, layout, roots, optimizers: known_optimizers, told, parameters, misses, .. } = state;
    let Some(torch) = torch else { return Ok(Looked::Nothing) };
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
    *parameters = walk.end();
    if roots.len() + known_optimizers.len() > MOST_KNOWN {
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
    Ok(if all { Looked::All } else { Looked::Known })
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
