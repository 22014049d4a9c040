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
use memtrace_trace::definition::{Definition, NoticeStatus, TensorKind};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::options::Cpu;

pub(crate) use self::python::type_name;
use self::python::{CApi, GilToken, PyObjectPtr};
use self::roots::Root;
use self::schedule::{Scan, ScanInputs, Schedule, cause};
use self::tensors::{TensorLayout, TorchSymbols};
use self::walk::{AddressHasher, BuildAddressHasher, ModelWalk, NameSink, Parameters};
use crate::emit::truncate;
use crate::guard::Guard;
use crate::hooks;
use crate::process::Process;
use crate::stack::CheckedMemory;
use crate::thread_local::with_thread_local;

/// A program without a backward pass is first scanned after `FIRST_FREES` freed blocks. Each later threshold is
/// `FREES_GROW` times larger.
const FIRST_FREES: u32 = 16;
const FREES_GROW: u32 = 8;
/// In a program that does not train, the first call of an unknown module schedules a scan after this many freed blocks.
/// By then the program has called all modules of the model, or a backward pass has run.
const FREES_AFTER_CALL: u32 = 128;
/// How many scans are postponed at most because a constructor is running.
const MAX_POSTPONED: u32 = 16;
/// At most this many optimizers are distinguished by the call site of `step()`.
const MAX_STEP_SITES: usize = 64;
/// At most this many modules are remembered as scanned.
const MAX_MODULES: usize = 1 << 16;
const TOPIC: &str = "torch.names";
/// At most this many models and optimizers are scanned again. In a program with more, every scan is a heap scan.
const MAX_RESCANNED: usize = 256;
/// After this many device tensors that do not confirm the layout, name reading is switched off.
const MAX_MISSES: u32 = 256;
/// Bytes that a pending name occupies beside its text.
const UPDATE_BYTES: usize = 32;
/// Upper bound on the bytes of pending names.
const MAX_PENDING_BYTES: usize = 64 << 20;
/// At most this many reported names are remembered.
const MAX_REPORTED: usize = 1 << 19;
/// Number of hash slots for addresses.
const ADDRESS_SLOTS: usize = 1 << 15;
/// Size in bytes of `PyGC_Head`, the collector's two words in front of an object.
const GC_HEAD_BYTES: usize = 16;
/// The low bits of the collector's links hold flags.
const LINK_FLAGS: usize = 3;

/// How many threads are running an autograd node. Shared by all recordings of this loaded library.
static RUNNING_NODES: AtomicU32 = AtomicU32::new(0);
/// Set while a scan waits until no thread runs an autograd node.
static IS_SCAN_POSTPONED: AtomicBool = AtomicBool::new(false);

/// Reports that an autograd node begins to run on the calling thread.
#[inline]
pub(crate) fn node_starts() {
    RUNNING_NODES.fetch_add(1, Ordering::Relaxed);
}

/// Reports that an autograd node has ended on the calling thread. The last one to end requests a postponed scan.
#[inline]
pub(crate) fn node_ends() {
    // These two accesses and the two in `is_node_running` are in one total order (`SeqCst`). So one of the two threads
    // sees the other's write.
    if RUNNING_NODES.fetch_sub(1, Ordering::SeqCst) == 1 && IS_SCAN_POSTPONED.load(Ordering::SeqCst) {
        request_postponed_scan();
    }
}

/// Requests the scan that waited for the end of a backward pass.
#[cold]
fn request_postponed_scan() {
    if IS_SCAN_POSTPONED.swap(false, Ordering::SeqCst)
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
    is_call_pending: AtomicBool,
    /// The reasons for the requested scan, a set of bits ([`cause`]).
    causes: AtomicU8,
    /// Set once the program has run a backward pass or an optimizer step.
    is_training: AtomicBool,
    /// Set once an allocation has failed.
    has_failed: AtomicBool,
    /// Blocks freed so far. Not exact, because threads increment it without synchronization.
    frees: AtomicU32,
    scan_at: AtomicU32,
    /// Hashes of label and stack, one for each call site that steps an optimizer. 0 is a free slot. A new hash counts
    /// as a change.
    sites: Box<[AtomicU64]>,
    has_new_site: AtomicBool,
    /// One bit for each hash slot of addresses. A set bit means that a name of memory in this slot was reported and no
    /// block in it was freed since. The bitmap is small, so that a free finds its word in the processor's L1 cache.
    /// Empty if tensor names are switched off.
    reported_slots: Box<[AtomicU64]>,
    /// For each hash slot, how often a free has cleared its bit.
    free_counts: Box<[AtomicU16]>,
    api: OnceLock<Option<CApi>>,
    is_scanning: AtomicBool,
    state: UnsafeCell<ScanState>,
}

// SAFETY: only the thread that has set `is_scanning` uses `state`, and all other fields are atomic. The addresses of
// Python objects are plain numbers. `scan` dereferences them only with the GIL, after it has checked that the objects
// are alive.
unsafe impl Sync for Names {}
// SAFETY: only the thread that has set `is_scanning` uses `state`. The addresses of Python objects in it are plain
// numbers and belong to no thread.
unsafe impl Send for Names {}

/// What one scan keeps for the next.
#[derive(Default)]
struct ScanState {
    torch: Option<TorchSymbols>,
    layout: Option<TensorLayout>,
    /// The models. They were alive at the last scan.
    roots: Vec<Root>,
    optimizers: Vec<ObjectId>,
    reported: Reported,
    /// Maps the object of each parameter that an optimizer has to its name. A parameter that is temporarily outside its
    /// module (FSDP moves them) keeps its name.
    parameters: Parameters,
    /// How many tensors did not confirm the layout.
    misses: u32,
    schedule: Schedule,
    /// The objects of the modules that scans have seen.
    modules: HashSet<usize, BuildAddressHasher>,
    compared_calls: usize,
    /// Set if there are more models and optimizers than [`MAX_RESCANNED`].
    has_too_many: bool,
    postponed: u32,
    is_verified: bool,
}

/// A Python object, identified by its address and its type.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ObjectId {
    object: usize,
    class: usize,
}

impl ObjectId {
    /// # Safety
    ///
    /// `object` points to a live Python object, and the calling thread holds the GIL.
    unsafe fn of(object: PyObjectPtr) -> ObjectId {
        // SAFETY: the caller guarantees that `object` is alive, so its type can be read.
        ObjectId { object: object.expose_provenance(), class: unsafe { python::type_of(object) }.addr() }
    }

    fn object(&self) -> PyObjectPtr {
        std::ptr::with_exposed_provenance_mut(self.object)
    }

    /// Whether the object is still alive: the garbage collector's list links it with both neighbors, and its type is
    /// unchanged. The memory of a freed object does not satisfy this.
    fn is_alive(&self, memory: &CheckedMemory) -> bool {
        let links = self.object.wrapping_sub(GC_HEAD_BYTES);
        let link = |at: usize, which: usize| memory.size(at, which * 8).map(|word| word & !LINK_FLAGS);
        let are_neighbors_linked = || {
            let (next, previous) = (link(links, 0)?, link(links, 1)?);
            let known = next != 0 && previous != 0 && memory.size(self.object, 8)? == self.class;
            Some(known && link(next, 1)? == links && link(previous, 0)? == links)
        };
        are_neighbors_linked() == Some(true)
    }
}

fn slot(address: u64) -> usize {
    ((address >> 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 49) as usize % ADDRESS_SLOTS
}

impl Names {
    /// `is_on` says whether the options request tensor names. Otherwise the tables are empty and take no memory.
    pub(crate) fn new(is_on: bool) -> Names {
        Names {
            is_armed: AtomicBool::new(is_on),
            is_call_pending: AtomicBool::new(false),
            causes: AtomicU8::new(0),
            is_training: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            frees: AtomicU32::new(0),
            scan_at: AtomicU32::new(FIRST_FREES),
            sites: (0..if is_on { MAX_STEP_SITES } else { 0 }).map(|_| AtomicU64::new(0)).collect(),
            has_new_site: AtomicBool::new(false),
            reported_slots: (0..if is_on { ADDRESS_SLOTS / 64 } else { 0 }).map(|_| AtomicU64::new(0)).collect(),
            free_counts: (0..if is_on { ADDRESS_SLOTS } else { 0 }).map(|_| AtomicU16::new(0)).collect(),
            api: OnceLock::new(),
            is_scanning: AtomicBool::new(false),
            state: UnsafeCell::new(ScanState::default()),
        }
    }

    /// Takes note of an event that is about to be written. Some events request a scan.
    #[inline(always)]
    pub(crate) fn observe(&self, event: &Event) {
        match event.action {
            Action::FreeRequested => self.block_freed(event.addr),
            // The CPU allocator has no separate free request and does not defer frees.
            Action::FreeCompleted if event.source == Source::TorchCpu => self.block_freed(event.addr),
            _ => {}
        }
        if event.flags.contains(Flags::IN_BACKWARD) && self.is_armed.load(Ordering::Relaxed) {
            self.request(cause::BACKWARD);
        }
        if matches!(event.action, Action::Oom) {
            self.has_failed.store(true, Ordering::Relaxed);
            self.request(cause::OOM);
        }
    }

    #[inline(always)]
    fn block_freed(&self, address: u64) {
        let slot = slot(address);
        let Some(reported_slots) = self.reported_slots.get(slot / 64) else { return };
        if reported_slots.load(Ordering::Relaxed) >> (slot % 64) & 1 != 0 {
            self.mark_outdated(slot);
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
    fn mark_outdated(&self, slot: usize) {
        let Some((reported_slots, number)) = self.reported_slots.get(slot / 64).zip(self.free_counts.get(slot)) else {
            return;
        };
        reported_slots.fetch_and(!(1 << (slot % 64)), Ordering::SeqCst);
        number.fetch_add(1, Ordering::SeqCst);
    }

    /// Reports that an optimizer step begins or ends on this thread. `site` is a hash of the optimizer's label and
    /// stack at the beginning, `None` at the end.
    pub(crate) fn optimizer_step(&self, site: Option<u64>) {
        if let Some(site) = site {
            self.add_step_site(site | 1);
        }
        self.request(cause::OPTIMIZER);
    }

    fn add_step_site(&self, site: u64) {
        for slot in &self.sites {
            match slot.compare_exchange(0, site, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return self.has_new_site.store(true, Ordering::Relaxed),
                Err(known) if known == site => return,
                Err(_) => {}
            }
        }
    }

    /// How many different call sites have stepped an optimizer.
    fn step_site_count(&self) -> usize {
        self.sites.iter().take_while(|site| site.load(Ordering::Relaxed) != 0).count()
    }

    /// Reports the first call of a module. Only a program that does not train needs the earlier scan that this
    /// schedules.
    pub(crate) fn module_first_called(&self) {
        if self.is_on() && !self.is_training.load(Ordering::Relaxed) {
            let earlier = self.frees.load(Ordering::Relaxed).saturating_add(FREES_AFTER_CALL);
            if earlier < self.scan_at.load(Ordering::Relaxed) {
                self.scan_at.store(earlier, Ordering::Relaxed);
            }
        }
    }

    /// A number that does not change while no block at this address is freed. Read it before reporting a name of memory
    /// at the address.
    fn free_count_at(&self, address: u64) -> u16 {
        let slot = slot(address);
        let Some((reported_slots, number)) = self.reported_slots.get(slot / 64).zip(self.free_counts.get(slot)) else {
            return 0;
        };
        let bit = 1 << (slot % 64);
        loop {
            reported_slots.fetch_or(bit, Ordering::SeqCst);
            let now = number.load(Ordering::SeqCst);
            // If the bit is still set, the thread that clears it increments the number afterwards.
            if reported_slots.load(Ordering::SeqCst) & bit != 0 {
                return now;
            }
        }
    }

    fn is_on(&self) -> bool {
        !self.free_counts.is_empty() && self.scan_at.load(Ordering::Relaxed) != 0
    }

    fn switch_off(&self) {
        self.scan_at.store(0, Ordering::Relaxed);
        self.is_armed.store(false, Ordering::Relaxed);
    }

    /// Queues a pending call, in which the interpreter calls [`scan`].
    #[cold]
    fn request(&self, causes: u8) {
        if causes & cause::TRAINING != 0 {
            self.is_training.store(true, Ordering::Relaxed);
        }
        if !self.is_on() {
            return;
        }
        self.causes.fetch_or(causes, Ordering::AcqRel);
        if self.is_call_pending.swap(true, Ordering::AcqRel) {
            return;
        }
        self.is_armed.store(false, Ordering::Relaxed);
        let Some(api) = self.api.get_or_init(CApi::find) else { return self.switch_off() };
        if !api.is_running() {
            return self.switch_off();
        }
        if !api.queue_call(scan) {
            // The interpreter's queue of pending calls is full.
            self.is_call_pending.store(false, Ordering::Release);
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
        && !process.names.is_scanning.swap(true, Ordering::Acquire)
    {
        let names = &process.names;
        if names.is_call_pending.swap(false, Ordering::AcqRel) && names.is_on() {
            names.is_armed.store(true, Ordering::Relaxed);
            // SAFETY: this thread has set `is_scanning`, so no other thread accesses `state` until it clears it.
            run_scan(process, unsafe { &mut *names.state.get() });
        }
        names.is_scanning.store(false, Ordering::Release);
    }
    // SAFETY: `__errno_location` returns the calling thread's own `errno`, which lives as long as the thread.
    unsafe { *libc::__errno_location() = errno };
    0
}

fn run_scan(process: &'static Process, state: &mut ScanState) {
    let names = &process.names;
    let start = clock::monotonic_ns();
    if is_node_running() || with_thread_local(|t| t.backward_depth.get()) > 0 {
        // A running backward pass is about to change gradients. The causes stay set for the scan that
        // `request_postponed_scan` requests.
        return;
    }
    let causes = names.causes.swap(0, Ordering::AcqRel);
    let request_again = || {
        names.causes.fetch_or(causes, Ordering::AcqRel);
        names.request_at_next_free();
    };
    let Some(Some(api)) = names.api.get() else { return };
    // SAFETY: the interpreter makes pending calls with the GIL, and this function does not release it.
    let Some(gil) = (unsafe { api.gil_token() }) else { return request_again() };
    let result = scan_names(process, state, gil, causes);
    process.count(Counter::NamesMicroseconds, clock::monotonic_ns().saturating_sub(start) / 1000);
    let frees = names.frees.load(Ordering::Relaxed);
    let next = match result {
        // Nothing to scan yet: a model under construction has no names, and PyTorch may not be imported.
        Ok(Scan::Nothing) if causes & cause::FREES != 0 => frees.saturating_add(FIRST_FREES),
        Ok(Scan::Nothing) => return,
        Ok(_) => frees.saturating_mul(FREES_GROW).max(FIRST_FREES),
        Err(reason) => {
            if let Some(mut guard) = Guard::enter() {
                guard.notice(TOPIC, NoticeStatus::Off, &format!("no names of tensors and modules: {reason}"));
            }
            return names.switch_off();
        }
    };
    names.scan_at.store(next, Ordering::Relaxed);
}

/// Whether any thread runs an autograd node. If so, the last of them requests the scan again when it ends.
fn is_node_running() -> bool {
    IS_SCAN_POSTPONED.store(true, Ordering::SeqCst);
    let is_node_running = RUNNING_NODES.load(Ordering::SeqCst) > 0;
    // If the last node has ended in between, its thread may have requested one more scan. That costs time and changes
    // no result.
    if !is_node_running {
        IS_SCAN_POSTPONED.store(false, Ordering::SeqCst);
    }
    is_node_running
}

impl ScanState {
    /// Forgets models and optimizers that no longer exist. Returns whether there were any.
    fn forget_freed(&mut self) -> bool {
        let before = self.roots.len() + self.optimizers.len();
        if before == 0 {
            return false;
        }
        match CheckedMemory::open() {
            Ok(memory) => {
                self.roots.retain(|root| root.id.is_alive(&memory));
                self.optimizers.retain(|optimizer| optimizer.is_alive(&memory));
            }
            Err(_) => {
                self.roots.clear();
                self.optimizers.clear();
            }
        }
        self.roots.len() + self.optimizers.len() != before
    }

    /// Whether a module was called that no scan has seen, or an optimizer was stepped at a new call site.
    fn is_changed(&mut self, process: &Process) -> bool {
        let names = &process.names;
        let calls = &process.torch.nn_calls;
        let from = std::mem::replace(&mut self.compared_calls, calls.count());
        let is_new_module = calls.objects_from(from).any(|object| !self.modules.contains(&object));
        let is_new_site =
            names.has_new_site.swap(false, Ordering::Relaxed) && names.step_site_count() > self.optimizers.len();
        is_new_module || is_new_site
    }
}

/// Whether this thread is inside a Python function of this name. The frames are read in place, because CPython would
/// materialize frame objects that outlive the request.
fn is_in_function(process: &Process, name: &str) -> bool {
    process.python().is_some_and(|python| python.is_in_function(name))
}

fn scan_names(
    process: &'static Process,
    state: &mut ScanState,
    gil: GilToken<'_>,
    causes: u8,
) -> Result<Scan, &'static str> {
    let names = &process.names;
    let Some(module) = gil.class(c"torch.nn.modules.module", c"Module") else { return Ok(Scan::Nothing) };
    let optimizer = gil.class(c"torch.optim.optimizer", c"Optimizer");
    if state.torch.is_none() {
        state.torch = Some(TorchSymbols::find()?);
    }
    let is_training = names.is_training.load(Ordering::Relaxed);
    let events = process.segment.header().next_seq.0.load(Ordering::Relaxed);
    let has_changed = state.is_changed(process) || state.has_too_many;
    let scan = state.schedule.decide(causes, ScanInputs { events, has_changed });
    if scan == Scan::Nothing {
        return Ok(Scan::Nothing);
    }
    // Before anything reads the known objects: those that are gone must not be touched.
    let scan = if state.forget_freed() {
        // The objects that replace them are unknown.
        state.schedule.decide(0, ScanInputs { events, has_changed: true }).max(scan)
    } else {
        scan
    };
    let all = scan == Scan::Heap;
    let can_wait = !is_training && !names.has_failed.load(Ordering::Relaxed) && state.postponed < MAX_POSTPONED;
    if all && can_wait && is_in_function(process, "__init__") {
        // A model under construction has no names yet.
        state.postponed += 1;
        return Ok(Scan::Nothing);
    }
    let Some(_gc_paused) = gil.pause_gc() else { return Err("the garbage collector cannot be paused") };
    let (mut modules, mut optimizers) = (Vec::new(), Vec::new());
    if all {
        let classes = [module, optimizer.unwrap_or(module)];
        let lists = Guard::enter().and_then(|mut guard| hooks::gc_list_heads(&mut guard));
        let is_listed = gil.instances(&classes, lists, &mut |which, object| {
            if which == 0 { modules.push(object) } else { optimizers.push(object) }
        });
        if !is_listed {
            return Err("the garbage collector's objects cannot be listed");
        }
        state.schedule.heap_scan_done(events, is_training);
        state.modules = modules.iter().map(|module| module.addr()).collect();
    }
    let seq = process.segment.header().next_seq.0.load(Ordering::Relaxed).saturating_sub(1);
    let cpu = match process.options.cpu {
        Cpu::Always => true,
        Cpu::Auto => !hooks::is_device_in_use(),
        Cpu::Never => false,
    };
    let ScanState {
        torch,
        layout,
        roots,
        optimizers: known_optimizers,
        reported,
        parameters,
        misses,
        modules: scanned,
        has_too_many,
        ..
    } = state;
    let Some(torch) = torch else { return Ok(Scan::Nothing) };
    reported.begin(names);
    let had_layout = layout.is_some();
    let mut walk = ModelWalk::new(gil, torch, layout, module, cpu, reported, parameters)
        .ok_or("the interpreter is out of memory")?;
    if all {
        // SAFETY: the interpreter has just listed these objects, and this thread holds the GIL.
        let known = |objects: Vec<PyObjectPtr>| objects.into_iter().map(|o| unsafe { ObjectId::of(o) }).collect();
        let found = walk.find_models(&modules);
        let before = std::mem::take(roots);
        *roots = roots::assign_prefixes(gil, &mut walk, &found, before);
        *known_optimizers = known(optimizers);
    }
    let mut pass = |walk: &mut ModelWalk<'_, '_>| {
        roots.retain(|root| {
            let before = walk.tensors_seen;
            walk.visit_model(root.id.object(), &root.prefix);
            // Forgets modules without tensors, such as loss functions.
            walk.tensors_seen != before
        });
        known_optimizers.iter().for_each(|optimizer| walk.visit_optimizer(optimizer.object()));
    };
    pass(&mut walk);
    if !had_layout && walk.has_layout() {
        // The layout was confirmed during this pass, so the tensors before that point have not been reported.
        walk.restart();
        pass(&mut walk);
    }
    let (layout_error, dropped) = (walk.layout_error, walk.dropped);
    *misses += walk.misses;
    let too_many = *misses >= MAX_MISSES && !walk.has_layout();
    let (current_parameters, seen) = walk.finish();
    *parameters = current_parameters;
    scanned.extend(seen);
    if scanned.len() > MAX_MODULES {
        scanned.clear();
    }
    *has_too_many = roots.len() + known_optimizers.len() > MAX_RESCANNED;
    if *has_too_many {
        roots.clear();
        known_optimizers.clear();
    }
    process.count(Counter::NamesDropped, dropped);
    if let Some(reason) = layout_error {
        return Err(reason);
    }
    if too_many {
        return Err("no tensor has the expected layout");
    }
    let is_verified = layout.is_some();
    state.report_pending(process, seq, is_verified);
    Ok(scan)
}

impl ScanState {
    /// Writes the pending names to the ring.
    fn report_pending(&mut self, process: &Process, seq: u64, is_verified: bool) {
        let pending = std::mem::take(&mut self.reported.pending);
        let dropped = std::mem::take(&mut self.reported.dropped);
        process.count(Counter::NamesDropped, dropped);
        if pending.is_empty() && (self.is_verified || !is_verified) {
            return;
        }
        let Some(mut guard) = Guard::enter() else { return self.reported.free_counts.clear() };
        if is_verified && !std::mem::replace(&mut self.is_verified, true) {
            guard.notice(
                TOPIC,
                NoticeStatus::Works,
                "TensorImpl and StorageImpl verified: PyTorch reports the same memory",
            );
        }
        for update in &pending {
            match update {
                PendingUpdate::Module { object, class, path } => {
                    let (class, name) = (truncate(process, class), truncate(process, path));
                    guard.define(&Definition::NnName { object: *object, seq, class, name });
                }
                PendingUpdate::Tensor { address, kind, name, shape } => {
                    let (name, shape) = (truncate(process, name), truncate(process, shape));
                    guard.define(&Definition::TensorName { address: *address, seq, kind: *kind, name, shape });
                }
            }
        }
    }
}

/// The names that were reported and those that are pending.
#[derive(Default)]
struct Reported {
    /// Maps a hash of kind, name and address to the number that the address had ([`Names::free_count_at`]).
    free_counts: HashMap<u64, u16, BuildAddressHasher>,
    /// The tensor names of the current recording.
    names: Option<&'static Names>,
    pending: Vec<PendingUpdate>,
    bytes: usize,
    dropped: u64,
}

enum PendingUpdate {
    Module { object: u64, class: Box<str>, path: Box<str> },
    Tensor { address: u64, kind: TensorKind, name: Box<str>, shape: Box<str> },
}

impl Reported {
    fn begin(&mut self, names: &'static Names) {
        self.names = Some(names);
        if self.free_counts.len() > MAX_REPORTED {
            self.free_counts.clear();
        }
    }

    /// Whether this name is new and fits into [`MAX_PENDING_BYTES`].
    fn is_new(&mut self, key: impl Hash, number: u16, bytes: usize) -> bool {
        let mut hash = AddressHasher::default();
        key.hash(&mut hash);
        if self.free_counts.insert(hash.finish(), number) == Some(number) {
            return false;
        }
        let has_room = self.bytes + bytes <= MAX_PENDING_BYTES;
        if has_room {
            self.bytes += bytes;
        } else {
            self.dropped += 1;
        }
        has_room
    }
}

impl NameSink for Reported {
    fn module(&mut self, object: PyObjectPtr, class: &str, path: &str) {
        let object = object.addr() as u64;
        if self.is_new((object, class, path), 0, UPDATE_BYTES + class.len() + path.len()) {
            self.pending.push(PendingUpdate::Module { object, class: class.into(), path: path.into() });
        }
    }

    fn tensor(&mut self, kind: TensorKind, name: &str, address: u64, shape: &dyn Fn() -> String) {
        let number = self.names.map_or(0, |names| names.free_count_at(address));
        if self.is_new((kind, name, address), number, UPDATE_BYTES + name.len()) {
            self.pending.push(PendingUpdate::Tensor { address, kind, name: name.into(), shape: shape().into() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_freed_memory_are_reported_again() {
        let names = Names::new(true);
        let addresses: Vec<u64> = (0..500).map(|n| 0x7f00_0000_0000 + n * 0x600).collect();
        let numbers: Vec<u16> = addresses.iter().map(|address| names.free_count_at(*address)).collect();
        let freed = |n: usize| n.is_multiple_of(7);
        for round in 1..4 {
            addresses.iter().enumerate().filter(|(n, _)| freed(*n)).for_each(|(_, address)| {
                // Only the first free after a report matters. Later allocations and frees at the address concern memory
                // that was not reported.
                (0..round).for_each(|_| names.block_freed(*address));
            });
            let now: Vec<u16> = addresses.iter().map(|address| names.free_count_at(*address)).collect();
            let has_changed = |n: usize| now.get(n) != numbers.get(n);
            assert!((0..addresses.len()).filter(|n| freed(*n)).all(has_changed), "round {round}");
            // Two addresses may share a hash slot.
            let others = (0..addresses.len()).filter(|n| !freed(*n) && has_changed(*n)).count();
            assert!(others < 20, "round {round}: {others} others");
        }
        assert_eq!(Names::new(false).free_count_at(0x1000), 0);
    }
}
