//! The callback of PyTorch's CUDA caching allocator:
//! `CUDAAllocator::attachAllocatorTraceTracker(std::function<void(const TraceEntry&)>)`.
//!
//! It is attached during the first CUDA call that the allocator makes or causes. This thread then holds the allocator's
//! mutex, which is recursive, and the allocator is not calling its trackers. So even the first `segment_alloc` is
//! recorded.
//!
//! These layouts are private, so each is verified:
//! - *The vtable slot* differs by version. libtorch exports the vtable of `CUDAPluggableAllocator` and its method of
//!   the same name, so the slot is the position of the method in that vtable.
//! - *The class* must be `NativeCachingAllocator` by its type info. Other allocators throw in this method.
//! - *`std::function`* is libstdc++'s, 32 bytes: functor (16), manager, invoker (bits/std_function.h).
//! - *`TraceEntry`*: the first segment event must have a time near now. Its address and size must be those of the CUDA
//!   call that this thread has just made, or of a part of it. Otherwise the tracker is ignored, and the reporter
//!   replaces it.
//!
//! Constraints: the callback runs under the allocator's lock. It takes no lock of Python and calls nothing of PyTorch
//! except one thread-local read. It blocks only while the ring is full ([`crate::recording::emit`]).

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memtrace_stackwalk::Lock;
use memtrace_trace::clock;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{Definition, NoticeStatus};
use memtrace_trace::event::{Action, Event, Flags, Source};

use super::flags::current_flags;
use super::libraries::{STACK_CHECKS_LEFT, is_allocator};
use super::{gate, gc, grad_mode, workspaces};
use crate::linker::mapped_object::containing;
use crate::linker::shared_objects::{exported_by, exported_with_prefix};
use crate::recording::errno::RestoreErrno;
use crate::recording::guard::Guard;
use crate::recording::observer::Observer;
use crate::recording::process::Process;
use crate::recording::thread_local::{LastSegment, with_thread_local};

/// The replacement for a tracker that cannot be used, for messages.
macro_rules! fallback {
    () => {
        "using the profiler's reporter"
    };
}
const FALLBACK: &str = fallback!();

/// The progress of attaching.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum AttachPhase {
    /// Not attempted yet.
    New = 0,
    /// A thread is attaching.
    Attaching = 1,
    /// Attached, with a layout that is not verified yet.
    Attached = 2,
    /// Verified, with the layout in [`TrackerState::layout`].
    Verified = 3,
    /// Not available. The reporter replaces it.
    Off = 4,
}

/// The verified facts about `TraceEntry`, a set of bits.
#[derive(Clone, Copy, PartialEq, Eq)]
struct EntryLayout(u32);

impl EntryLayout {
    /// `pool` is at offset 48 and `time` at 64 (PyTorch 2.7 and later). Otherwise `time` is at 48.
    const POOL: u32 = 1;
    /// `time` is from the clock of [`clock::now`], so that the clock need not be read again.
    const TICKS: u32 = 2;
    /// Set in every verified layout, which is therefore never 0.
    const VERIFIED: u32 = 4;

    #[inline]
    fn has_pool(self) -> bool {
        self.0 & Self::POOL != 0
    }

    /// The offset of the timestamp in bytes. `None` if it cannot be used.
    #[inline]
    fn ticks_at(self) -> Option<usize> {
        (self.0 & Self::TICKS != 0).then_some(if self.has_pool() { 64 } else { 48 })
    }
}

/// The tracker's part of a recording.
pub(crate) const OBSERVER: Observer = Observer::with_state(|_, _| TRACKER.start());

/// The tracker of this process. A forked child inherits PyTorch with our tracker attached, and so this state.
pub(super) static TRACKER: TrackerState = TrackerState {
    phase: AtomicU32::new(AttachPhase::New as u32),
    layout: AtomicU32::new(0),
    reports: AtomicU32::new(0),
    pools: PoolIds::new(),
};

/// The tracker of one process. It is a static and no [`Slot`](crate::recording::slot::Slot), because every event reads
/// it.
pub(super) struct TrackerState {
    phase: AtomicU32,
    /// An [`EntryLayout`], 0 before verification.
    layout: AtomicU32,
    reports: AtomicU32,
    /// The pool ids of PyTorch.
    pools: PoolIds,
}

impl TrackerState {
    /// Starts a recording: the first one, or that of a forked child.
    fn start(&self) {
        // Attaching comes after the start of a recording. So a thread of the parent, which does not exist in this
        // process, was attaching.
        if self.phase.load(Ordering::Acquire) == AttachPhase::Attaching as u32 {
            self.set_phase(AttachPhase::Off);
        }
        self.reports.store(0, Ordering::Relaxed);
        self.pools.forget();
        workspaces::start();
    }

    /// Whether allocator events come from the tracker, or are about to: the first one verifies the layout.
    #[inline]
    pub(super) fn is_attached(&self) -> bool {
        let phase = self.phase.load(Ordering::Relaxed);
        phase == AttachPhase::Verified as u32 || phase == AttachPhase::Attached as u32
    }

    /// The verified layout. `None` before verification, and if it failed.
    #[inline]
    fn layout(&self) -> Option<EntryLayout> {
        let layout = EntryLayout(self.layout.load(Ordering::Relaxed));
        (layout.0 != 0).then_some(layout)
    }

    /// Counts a call of the reporter. Not exact if several threads count at once.
    #[inline]
    pub(super) fn count_report(&self) -> u32 {
        let reports = self.reports.load(Ordering::Relaxed).wrapping_add(1);
        self.reports.store(reports, Ordering::Relaxed);
        reports
    }

    fn set_phase(&self, phase: AttachPhase) {
        self.phase.store(phase as u32, Ordering::Release);
    }
}

/// At most this many private pools have an id of their own. Later ones share the last id.
const MAX_POOLS: usize = 4096;

/// PyTorch's ids of the pools seen so far. Our id is the index plus one.
struct PoolIds {
    lock: Lock,
    known: AtomicU32,
    ids: [[AtomicU64; 2]; MAX_POOLS],
}

impl PoolIds {
    const fn new() -> PoolIds {
        PoolIds {
            lock: Lock::new(),
            known: AtomicU32::new(0),
            ids: [const { [const { AtomicU64::new(0) }; 2] }; MAX_POOLS],
        }
    }

    /// Forgets the pools of another recording.
    fn forget(&self) {
        self.known.store(0, Ordering::Relaxed);
        self.lock.forget_holder();
    }
}

/// libstdc++'s `std::function<void(const TraceEntry&)>`.
#[repr(C)]
struct StdFunction {
    functor: [u64; 2],
    manager: unsafe extern "C" fn(*mut u64, *const u64, u32) -> bool,
    invoker: unsafe extern "C-unwind" fn(*const u64, *const u8),
}

/// Operations of a `std::function`'s manager: 0 type info, 1 pointer to the functor, 2 clone, 3 destroy.
unsafe extern "C" fn manage_functor(to: *mut u64, from: *const u64, operation: u32) -> bool {
    if !to.is_null() {
        let value = match operation {
            0 => 0, // No type info, which PyTorch never requests.
            1 => from as u64,
            _ => return false,
        };
        // SAFETY: `to` is not null, and the caller provides storage for one pointer there.
        unsafe { *to = value };
    }
    false
}

const ALLOCATOR: &CStr = c"_ZN3c104cuda20CUDACachingAllocator9allocatorE";
const PLUGGABLE_VTABLE: &CStr = c"_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE";
/// The beginning of the names of that class's methods.
macro_rules! pluggable_method {
    ($name:literal) => {
        concat!("_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator", $name).as_bytes()
    };
}
const ATTACH_TRACKER: &[u8] = pluggable_method!("27attachAllocatorTraceTracker");
/// `bool initialized()`.
pub(super) const INITIALIZED: &[u8] = pluggable_method!("11initializedE");
/// `SnapshotInfo snapshot(...)`.
pub(super) const SNAPSHOT: &[u8] = pluggable_method!("8snapshotE");
/// More slots than any allocator interface has virtual functions.
const VTABLE_LIMIT: usize = 160;

/// Attaches the tracker once. Call it during a CUDA call of the allocator, without a guard.
pub(crate) fn attach() {
    // The first call connects to the launcher, which must not change `errno`.
    let errno = RestoreErrno::new();
    let process = Process::current();
    drop(errno);
    if process.is_none() {
        return;
    }
    let state = &TRACKER;
    if state.phase.load(Ordering::Relaxed) != AttachPhase::New as u32
        || state
            .phase
            .compare_exchange(
                AttachPhase::New as u32,
                AttachPhase::Attaching as u32,
                Ordering::Relaxed,
                Ordering::Relaxed,
            )
            .is_err()
    {
        return;
    }
    // The phase stays `Attaching` until the result is known, so other threads continue without waiting.
    let found = find_method(ATTACH_TRACKER);
    match found {
        Ok((allocator, method, slot)) => {
            state.set_phase(AttachPhase::Attached);
            let function = StdFunction { functor: [0; 2], manager: manage_functor, invoker: on_trace_entry };
            // SAFETY: `method` is the slot of `attachAllocatorTraceTracker(std::function)` in the vtable of
            // `allocator`. A class with a destructor is passed by the address of the caller's copy (Itanium C++ ABI
            // 3.1.1).
            unsafe {
                let method: unsafe extern "C-unwind" fn(*mut c_void, *const StdFunction) = std::mem::transmute(method);
                method(allocator, &function);
            }
            if let Some(mut guard) = Guard::enter() {
                guard.notice("torch.tracker", NoticeStatus::Remark, &format!("attached by vtable slot {slot}"));
            }
        }
        Err(reason) => {
            state.set_phase(AttachPhase::Off);
            if let Some(mut guard) = Guard::enter() {
                let text = format!("not attached: {reason}");
                guard.notice("torch.tracker", NoticeStatus::Off, &text);
            }
        }
    }
}

/// Attaches the tracker if PyTorch's allocator has caused another object's CUDA call, as with a `MemPool` whose
/// allocator the program provides. This thread then holds the allocator's lock, as in the allocator's own calls.
///
/// Returns whether the allocated memory may be the allocator's first segment. `is_pool` says that the memory comes from
/// a CUDA pool, which is never a segment.
pub(crate) fn attach_through_other(is_pool: bool) -> bool {
    let checks_left = STACK_CHECKS_LEFT.load(Ordering::Relaxed);
    if is_pool || checks_left == 0 {
        return false;
    }
    if Process::current().is_none() {
        return false;
    }
    let state = &TRACKER;
    let phase = state.phase.load(Ordering::Relaxed);
    if phase == AttachPhase::New as u32 {
        STACK_CHECKS_LEFT.store(checks_left - 1, Ordering::Relaxed);
        let is_in_allocator = Guard::enter().is_some_and(|mut guard| guard.is_called_through(is_allocator));
        if is_in_allocator {
            attach();
        }
        return is_in_allocator;
    }
    let attached = phase == AttachPhase::Attached as u32;
    if !attached {
        STACK_CHECKS_LEFT.store(0, Ordering::Relaxed);
    }
    attached
}

/// The allocator object, the address of its method and the method's slot. `name` is the beginning of the name of the
/// same method of `CUDAPluggableAllocator`. The error is the reason why the method cannot be called.
pub(super) fn find_method(name: &[u8]) -> Result<(*mut c_void, usize, usize), &'static str> {
    let pointer = exported_by(b"libc10_cuda.so", ALLOCATOR).cast::<*mut c_void>();
    if pointer.is_null() {
        return Err(concat!("libc10_cuda exports no allocator pointer; ", fallback!()));
    }
    // SAFETY: libc10_cuda exports the data `std::atomic<CUDAAllocator*> allocator`.
    let allocator = unsafe { *pointer };
    if allocator.is_null() {
        return Err(concat!("the allocator is not set yet; ", fallback!()));
    }
    // SAFETY: an object with virtual functions begins with its vtable pointer. The word before the first function
    // points to the type info, whose second word points to the name (Itanium C++ ABI 2.5, 2.9).
    let (vtable, class) = unsafe {
        let vtable = *allocator.cast::<*const usize>();
        let type_info = vtable.sub(1).read() as *const *const std::ffi::c_char;
        (vtable, CStr::from_ptr(type_info.add(1).read()))
    };
    let class = class.to_bytes();
    if !class.windows(22).any(|w| w == b"NativeCachingAllocator") {
        return Err("the allocator is not PyTorch's native caching allocator: each of its blocks is a CUDA call");
    }
    let slot = method_slot(name)
        .ok_or(concat!("libtorch exports no CUDAPluggableAllocator, which locates the vtable slot; ", fallback!()))?;
    // SAFETY: `slot` is inside the vtable of another class with the same interface, so it is inside this one.
    let method = unsafe { vtable.add(slot).read() };
    let object = containing(method);
    if !object.is_some_and(|o| is_allocator(o.file_name())) {
        return Err(concat!("the vtable slot does not point into libc10_cuda; ", fallback!()));
    }
    Ok((allocator, method, slot))
}

fn method_slot(name: &[u8]) -> Option<usize> {
    for library in [&b"libtorch_cuda.so"[..], b"libtorch_python.so"] {
        let vtable = exported_by(library, PLUGGABLE_VTABLE).cast::<usize>();
        let Some(method) = exported_with_prefix(library, name) else { continue };
        if vtable.is_null() {
            continue;
        }
        // The first two words are the offset to top and the type info.
        // SAFETY: reads at most `VTABLE_LIMIT` words of a data symbol. Other vtables follow this one in the same
        // section, so the words exist even after its end.
        let found = (0..VTABLE_LIMIT).find(|slot| unsafe { vtable.add(2 + slot).read() } == method);
        if found.is_some() {
            return found;
        }
    }
    None
}

/// The fields of `TraceEntry` that are read. Offsets are from PyTorch's c10/core/CachingDeviceAllocator.h (2.11) and
/// c10/cuda/CUDACachingAllocator.h (2.4).
struct TraceEntry(*const u8);

impl TraceEntry {
    fn word(&self, offset: usize) -> u64 {
        // SAFETY: PyTorch passes a live entry. The smallest has 80 bytes (2.2: seven fields and two words of time), and
        // no offset used here is beyond that.
        unsafe { self.0.add(offset).cast::<u64>().read_unaligned() }
    }

    fn action(&self) -> u32 {
        self.word(0) as u32
    }

    fn device(&self) -> i16 {
        i16::from((self.word(0) >> 32) as u8 as i8)
    }

    fn addr(&self) -> u64 {
        self.word(8)
    }

    fn stream(&self) -> u64 {
        self.word(32)
    }

    fn size(&self) -> u64 {
        self.word(40)
    }
}

/// The allocator calls this for every entry, under its lock.
unsafe extern "C-unwind" fn on_trace_entry(_functor: *const u64, entry: *const u8) {
    let entry = TraceEntry(entry);
    if !gate::is_open() && (gate::is_taking_snapshot() || !gate::admits(entry.device())) {
        return before_the_state(&entry);
    }
    let Some(mut guard) = Guard::enter() else { return };
    let Some(layout) = TRACKER.layout().or_else(|| verify_first(&mut guard, &entry)) else { return };
    let Some(action) = Action::from_wire(entry.action().into()).filter(|a| *a <= Action::Annotate) else {
        guard.process().count(Counter::UnknownActions, 1);
        return;
    };
    // Asked before other values are known, which a call would have to save.
    let flags = if action == Action::Alloc { workspaces::flag(&mut guard, entry.size()) } else { Flags::default() };
    let mut event = Event {
        ticks: layout.ticks_at().map_or_else(clock::now, |at| entry.word(at)),
        addr: entry.addr(),
        size: entry.size(),
        stream: entry.stream(),
        source: Source::Torch,
        action,
        device: entry.device(),
        pool: if layout.has_pool() { pool_id(&mut guard, (entry.word(48), entry.word(56))) } else { 0 },
        ..Event::EMPTY
    };
    // A completion within the same free has the request's stack, because the reporter, called at the end of a free, was
    // not called in between. A deferred completion happens at a later allocator call and gets that call's stack.
    if action == Action::FreeCompleted && guard.complete(&event) {
        return;
    }
    (event.stack, event.context) = guard.stack_and_context();
    event.flags = current_flags().with(flags);
    if matches!(action, Action::FreeRequested | Action::FreeCompleted) {
        event.flags = event.flags.with(gc::flag(&mut guard));
    }
    match action {
        Action::Alloc | Action::FreeRequested => guard.write_unpublished(event),
        Action::Oom => {
            if let Some(before) = BEFORE_OUT_OF_MEMORY.get() {
                before(&mut guard, event.device);
            }
            guard.emit(event);
        }
        _ => {
            guard.emit_inlined(event);
        }
    }
}

/// The function to call before an out-of-memory error of a device is recorded.
static BEFORE_OUT_OF_MEMORY: OnceLock<fn(&mut Guard, i16)> = OnceLock::new();

/// Has `call` called before each out-of-memory error of PyTorch's allocator is recorded, under its lock.
pub(crate) fn before_out_of_memory(call: fn(&mut Guard, i16)) {
    let _ = BEFORE_OUT_OF_MEMORY.set(call);
}

/// Verifies the layout with the first entry. `None` if that fails; then the reporter replaces the tracker.
#[cold]
fn verify_first(guard: &mut Guard, entry: &TraceEntry) -> Option<EntryLayout> {
    let state = Some(&TRACKER).filter(|state| state.is_attached())?;
    match verify(entry) {
        Ok(layout) => {
            state.layout.store(layout.0, Ordering::Relaxed);
            state.set_phase(AttachPhase::Verified);
            report_layout(guard, layout);
            Some(layout)
        }
        Err(reason) => {
            state.set_phase(AttachPhase::Off);
            let text = format!("ignored: {reason}; {FALLBACK}");
            guard.notice("torch.tracker", NoticeStatus::Off, &text);
            None
        }
    }
}

/// Handles an entry of a device whose state is not known yet. The snapshot that this process takes now marks the point
/// from which on its entries are recorded.
#[cold]
fn before_the_state(entry: &TraceEntry) {
    const SNAPSHOT: u32 = Action::Snapshot as u32;
    if entry.action() != SNAPSHOT || !gate::is_taking_snapshot() {
        return;
    }
    if TRACKER.layout().is_none() {
        let Some(layout) = layout_of_snapshot(entry) else { return };
        TRACKER.layout.store(layout.0, Ordering::Relaxed);
        TRACKER.set_phase(AttachPhase::Verified);
    }
    gate::admit_next(entry.size());
}

/// The layout of the entry of a snapshot, which is being taken: its time is between the beginning of the call and now.
fn layout_of_snapshot(entry: &TraceEntry) -> Option<EntryLayout> {
    let since = gate::snapshot_began();
    let is_exact = |at| since <= entry.word(at) && entry.word(at) <= clock::now();
    let is_time = |at| is_exact(at) || is_near_now(entry.word(at));
    let ticks = |at| if is_exact(at) { EntryLayout::TICKS } else { 0 };
    if is_time(64) && entry.word(48) < 1 << 32 && entry.word(56) < 1 << 32 {
        Some(EntryLayout(EntryLayout::VERIFIED | EntryLayout::POOL | ticks(64)))
    } else {
        is_time(48).then(|| EntryLayout(EntryLayout::VERIFIED | ticks(48)))
    }
}

/// Reports the layout that a snapshot has verified.
pub(crate) fn report_verified(guard: &mut Guard) {
    let Some(layout) = TRACKER.layout() else { return };
    report_layout(guard, layout);
}

fn report_layout(guard: &mut Guard, layout: EntryLayout) {
    let pool = if layout.has_pool() { "with pool id" } else { "without pool id" };
    let time = if layout.ticks_at().is_some() { "with memtrace's clock" } else { "with another clock" };
    guard.notice("torch.tracker", NoticeStatus::Works, &format!("TraceEntry verified, {pool}, {time}"));
    grad_mode::report(guard);
    if layout.has_pool() {
        // Defines the default pool. A reader recognizes by it that the pools of events are known.
        guard.define(&Definition::Pool { id: 0, pool: (0, 0) });
    }
}

/// Whether PyTorch's allocator calls the tracker, and why not.
pub(crate) fn is_attached() -> bool {
    TRACKER.is_attached()
}

/// Compares the first entry with the CUDA call that this thread has just made. If its time is between that call and
/// now, both clocks are the same.
fn verify(entry: &TraceEntry) -> Result<EntryLayout, &'static str> {
    let LastSegment { addr, size, since } = with_thread_local(|t| t.last_segment.get());
    let is_same_segment = match entry.action() {
        // An allocator that the program provides may have requested more than the entry's size.
        3 => entry.addr() == addr && (1..=size).contains(&entry.size()) && entry.size().is_multiple_of(MIN_BLOCK_SIZE),
        // An expandable segment is mapped in pieces, and the entry covers the last piece.
        5 => addr >= entry.addr() && addr.wrapping_add(size) <= entry.addr().wrapping_add(entry.size()),
        _ => false,
    };
    if !is_same_segment || size == 0 {
        return Err("the first entry differs from the segment that CUDA has just allocated");
    }
    let ticks = |at| if since <= entry.word(at) && entry.word(at) <= clock::now() { EntryLayout::TICKS } else { 0 };
    if is_near_now(entry.word(64)) && entry.word(48) < 1 << 32 && entry.word(56) < 1 << 32 {
        Ok(EntryLayout(EntryLayout::VERIFIED | EntryLayout::POOL | ticks(64)))
    } else if is_near_now(entry.word(48)) {
        Ok(EntryLayout(EntryLayout::VERIFIED | ticks(48)))
    } else {
        Err("the first entry has no timestamp near the current time")
    }
}

/// The size of a segment is a multiple of this many bytes (`kMinBlockSize`).
const MIN_BLOCK_SIZE: u64 = 512;

/// Whether a time of PyTorch's clock is within seconds of now. `c10::getApproximateTime` is the time-stamp counter on
/// x86-64, and `CLOCK_REALTIME` on other processors (c10/util/ApproximateClock.h).
fn is_near_now(time: u64) -> bool {
    const SECONDS: u64 = 20_000_000_000;
    [clock::now(), clock::monotonic_ns(), clock::realtime_ns()].iter().any(|now| time.abs_diff(*now) < SECONDS)
}

/// Our id of a pool. 0 is the default pool.
#[inline]
pub(crate) fn pool_id(guard: &mut Guard, pool: (u64, u64)) -> u16 {
    if pool == (0, 0) { 0 } else { private_pool_id(guard, pool) }
}

#[cold]
fn private_pool_id(guard: &mut Guard, pool: (u64, u64)) -> u16 {
    let pools = &TRACKER.pools;
    let find = |known: u32| {
        pools.ids.iter().take(known as usize).position(|id| {
            id.first().is_some_and(|a| a.load(Ordering::Relaxed) == pool.0)
                && id.last().is_some_and(|b| b.load(Ordering::Relaxed) == pool.1)
        })
    };
    if let Some(index) = find(pools.known.load(Ordering::Acquire)) {
        return index as u16 + 1;
    }
    let Some(locked) = pools.lock.lock() else {
        guard.process().count(Counter::DefinitionsDropped, 1);
        return 0;
    };
    let known = pools.known.load(Ordering::Relaxed);
    let index = find(known).unwrap_or_else(|| {
        let index = (known as usize).min(MAX_POOLS - 1);
        if let Some([a, b]) = pools.ids.get(index) {
            a.store(pool.0, Ordering::Relaxed);
            b.store(pool.1, Ordering::Relaxed);
        }
        pools.known.store(index as u32 + 1, Ordering::Release);
        index
    });
    drop(locked);
    let id = index as u16 + 1;
    guard.define(&Definition::Pool { id, pool });
    id
}
