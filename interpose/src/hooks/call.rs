//! One hooked CUDA call, from its entry to its event.
//!
//! An allocation is recorded after its call has returned, a release before its call is made. So no other thread can get
//! the address and record it in between. If a release fails, [`Action::Retract`] cancels its event.

use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use memtrace_trace::api::Memory as Kind;
use memtrace_trace::clock;
use memtrace_trace::counters::Counter;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::ModuleId;

use super::location::{self, current_device};
use super::registry::Hook;
use super::{device, entry, pools, torch};
use crate::guard::Guard;
use crate::objects::{self, Caller, MODULES};
use crate::process::Process;
use crate::real::{self, Original};
use crate::thread::{LastSegment, thread};

/// `CUDA_ERROR_UNKNOWN` and `cudaErrorUnknown`: the result of a call whose original cannot be found.
pub(super) const UNKNOWN: i32 = 999;

/// A call in progress.
pub(super) struct Call {
    hook: &'static Hook,
    caller: Option<Caller>,
    /// The caller's index among the objects that call CUDA.
    module: Option<usize>,
    /// Whether PyTorch's caching allocator makes this call, for one of its segments.
    in_allocator: bool,
}

/// The memory that a call allocates or releases. `size` is in bytes.
#[derive(Clone, Copy, Default)]
pub(super) struct Memory {
    pub(super) addr: u64,
    pub(super) size: u64,
    pub(super) stream: u64,
    /// The device if the call itself names it: one more than its ordinal, or [`ON_HOST`]. 0 means the current device.
    pub(super) place: u64,
}

/// The [`Memory::place`] of memory on the host.
pub(super) const ON_HOST: u64 = u64::MAX;

impl Call {
    /// Starts a call. It must come first in a body, because the next stub overwrites the caller's address.
    #[inline]
    pub(super) fn begin(hook: &'static Hook) -> Call {
        let caller = objects::containing(entry::caller());
        let module = caller.as_ref().and_then(objects::module_index);
        let direct = caller.is_some_and(|c| is_allocator(&c, module));
        if direct {
            torch::tracker::attach();
        }
        let nested = !hook.is_runtime() && thread(|t| t.runtime_depth.get()) > 0;
        let in_allocator = direct || nested && thread(|t| t.runtime_in_allocator.get());
        Call { hook, caller, module, in_allocator }
    }

    /// The original function. Null if there is none, which is counted.
    pub(super) fn original(&self) -> *mut c_void {
        let found = if self.hook.is_runtime() {
            runtime_original(self.hook, self.caller.as_ref(), self.module)
        } else {
            driver_original(self.hook)
        };
        if found.is_null()
            && let Some(process) = Process::if_started()
        {
            process.count(Counter::OriginalsMissing, 1);
        }
        found
    }

    /// Calls `original`. Returns its result and whether a driver call was recorded inside a runtime call.
    #[inline]
    pub(super) fn make(&self, original: impl FnOnce() -> i32) -> (i32, bool) {
        if !self.hook.is_runtime() {
            return (original(), false);
        }
        // No destructor restores these values, because the runtime's C functions do not throw.
        let outer = thread(|t| {
            let outer = (t.nested_seen.replace(false), t.runtime_in_allocator.replace(self.in_allocator));
            t.runtime_depth.set(t.runtime_depth.get() + 1);
            outer
        });
        let result = original();
        let seen = thread(|t| {
            t.runtime_depth.set(t.runtime_depth.get() - 1);
            t.runtime_in_allocator.set(outer.1);
            t.nested_seen.replace(outer.0)
        });
        (result, seen)
    }

    /// Records the memory that the call allocated, or that the call failed.
    pub(super) fn obtained(&self, action: Action, result: i32, nested_seen: bool, memory: impl FnOnce() -> Memory) {
        let mut memory = memory();
        if result == 0 && memory.addr == 0 {
            return; // A request for 0 bytes returns no memory.
        }
        if result == 0 && memory.place == 0 {
            memory.place = match self.hook.api.memory() {
                Some(Kind::Pool) => location::of_address(memory.addr),
                // A mapping is on the device of its physical memory.
                Some(Kind::Address) if action == Action::Map => location::of_handle(memory.stream),
                _ => 0,
            };
        }
        let obtains = result == 0 && action != Action::Reserve && !self.hook.is_host();
        // Of a runtime call and the driver calls inside it, only the outer one is examined.
        let outer = self.hook.is_runtime() || thread(|t| t.runtime_depth.get()) == 0;
        let other = || outer && torch::tracker::attach_through_other(self.hook.is_pool());
        if obtains && (self.in_allocator || other()) {
            let segment = LastSegment { addr: memory.addr, size: memory.size, since: clock::now() };
            thread(|t| t.last_segment.set(segment));
        }
        self.record(action, memory, result, nested_seen);
        if result == 0 && self.hook.is_pool() && !self.hook.is_runtime() {
            self.pool_changed(pools::of_address(memory.addr), memory.place);
        }
    }

    /// Records a release before it is made. Returns the event's number for [`Self::failed`], 0 if there is none.
    pub(super) fn releasing(&self, action: Action, mut memory: Memory) -> u64 {
        if memory.addr == 0 {
            return 0;
        }
        memory.place = match self.hook.api.memory() {
            Some(Kind::Physical) => location::of_handle(memory.addr),
            Some(Kind::Device | Kind::Managed | Kind::Pool | Kind::Imported) => location::of_address(memory.addr),
            Some(Kind::Address) if action == Action::Unmap => location::of_address(memory.addr),
            _ => 0,
        };
        self.record(action, memory, 0, false)
    }

    /// Records how much memory a pool holds, if that has changed. `place` is the device if this call names it.
    pub(super) fn pool_changed(&self, pool: u64, place: u64) {
        let totals = pools::changed(pool, place);
        let Some(mut guard) = Guard::enter() else { return };
        let device = location::ordinal(totals.map_or(place, |t| t.place), current_device);
        if let Some(totals) = totals {
            let flags = if thread(|t| t.runtime_depth.get()) > 0 { Flags::NESTED } else { Flags::default() };
            let module = self.module(&mut guard);
            guard.emit(Event {
                addr: totals.used,
                size: totals.reserved,
                stream: totals.pool,
                source: Source::Driver,
                action: Action::Totals,
                device,
                flags,
                api: self.hook.api,
                module,
                ..Event::EMPTY
            });
        }
        device::obtained(&mut guard, device, totals.map_or(0, |t| t.grown));
    }

    /// Cancels the recorded release `seq`, because its call failed.
    pub(super) fn failed(&self, seq: u64, result: i32) {
        if seq != 0 {
            self.record(Action::Retract, Memory { addr: seq, ..Memory::default() }, result, false);
        }
    }

    fn module(&self, guard: &mut Guard) -> ModuleId {
        let known = self.caller.as_ref().zip(self.module);
        known.map_or(ModuleId::NONE, |(caller, index)| objects::module_id(caller, index, guard))
    }

    fn record(&self, action: Action, memory: Memory, result: i32, nested_seen: bool) -> u64 {
        let Some(mut guard) = Guard::enter() else { return 0 };
        let mut flags = torch::moment();
        if self.in_allocator {
            flags = flags.with(Flags::IN_ALLOCATOR);
        }
        if nested_seen {
            flags = flags.with(Flags::HAS_NESTED);
        }
        if !self.hook.is_runtime() && thread(|t| t.runtime_depth.get()) > 0 {
            flags = flags.with(Flags::NESTED);
            thread(|t| t.nested_seen.set(true));
        }
        let module = self.module(&mut guard);
        let device = match self.hook.api.memory() {
            // An address range belongs to no device.
            Some(Kind::Address) if memory.place == 0 => -1,
            _ if self.hook.is_host() => -1,
            _ => location::ordinal(memory.place, current_device),
        };
        // An allocation from a pool takes device memory only when the pool grows.
        if action == Action::Alloc && device >= 0 && !self.hook.is_pool() {
            let counts = result == 0 && !nested_seen;
            device::obtained(&mut guard, device, if counts { memory.size } else { 0 });
        }
        let (stack, context) = guard.event_place();
        guard.emit(Event {
            addr: memory.addr,
            size: memory.size,
            stream: memory.stream,
            stack,
            context,
            source: if self.hook.is_runtime() { Source::Runtime } else { Source::Driver },
            action,
            device,
            flags,
            api: self.hook.api,
            result,
            module,
            ..Event::EMPTY
        })
    }
}

/// Whether the caller is PyTorch's caching allocator. Its file name is checked once per object.
#[inline]
fn is_allocator(caller: &Caller, module: Option<usize>) -> bool {
    const NO: u8 = 1;
    const YES: u8 = 2;
    static KNOWN: [AtomicU8; MODULES] = [const { AtomicU8::new(0) }; MODULES];
    let known = module.and_then(|module| KNOWN.get(module));
    match known.map_or(0, |known| known.load(Ordering::Relaxed)) {
        0 => {
            let is = torch::is_allocator(caller.file_name());
            known.inspect(|known| known.store(if is { YES } else { NO }, Ordering::Relaxed));
            is
        }
        known => known == YES,
    }
}

/// A handle of the driver library. Null if it is not loaded.
pub(super) fn driver() -> *mut c_void {
    static DRIVER: Original = Original::new();
    DRIVER.get(|| real::loaded(c"libcuda.so.1"))
}

/// The driver's own function of this name, not our export. Null if there is none.
pub(super) fn driver_function(cache: &Original, name: &std::ffi::CStr) -> *mut c_void {
    cache.get(|| {
        let driver = driver();
        if driver.is_null() { driver } else { real::lookup(driver, name) }
    })
}

fn driver_original(hook: &Hook) -> *mut c_void {
    hook.original.get(|| {
        let driver = driver();
        interposed(hook).or_else(|| (!driver.is_null()).then(|| real::lookup(driver, hook.symbol))).unwrap_or_default()
    })
}

/// The function of another library that interposes the same symbol and was preloaded after us. The program would call
/// it without us, so it becomes the original.
fn interposed(hook: &Hook) -> Option<*mut c_void> {
    let found = real::lookup(libc::RTLD_NEXT, hook.symbol);
    let object = objects::containing(found as usize)?;
    let genuine =
        [&b"libcuda.so"[..], b"libcudart.so", b"libcudart-"].iter().any(|n| object.file_name().starts_with(n));
    (!genuine && !found.is_null()).then_some(found)
}

/// The originals of runtime functions, by hook and calling module. A process may contain several runtimes, and each
/// caller uses its own.
static RUNTIME: [[AtomicPtr<c_void>; MODULES]; super::registry::RUNTIME_HOOKS] =
    [const { [const { AtomicPtr::new(std::ptr::null_mut()) }; MODULES] }; super::registry::RUNTIME_HOOKS];

fn runtime_original(hook: &'static Hook, caller: Option<&Caller>, module: Option<usize>) -> *mut c_void {
    let place = module.and_then(|module| RUNTIME.get(hook.runtime_index())?.get(module));
    if let Some(known) = place.map(|p| p.load(Ordering::Relaxed)).filter(|p| !p.is_null()) {
        return known;
    }
    let ours = hook.entry as *mut c_void;
    let sound = |found: *mut c_void| !found.is_null() && found != ours;
    // The order of the search:
    // 1. another interposer's function;
    // 2. the function that the caller is linked with;
    // 3. the function that `dlsym` returned to the program;
    // 4. the executable's function;
    // 5. the function of any loaded runtime.
    let own =
        caller.map(|c| real::loaded(c.path())).filter(|h| !h.is_null() && !caller.is_some_and(|c| c.path().is_empty()));
    let mut found = interposed(hook).unwrap_or_default();
    if !sound(found) {
        found = own.map_or(std::ptr::null_mut(), |handle| real::lookup(handle, hook.symbol));
    }
    own.into_iter().for_each(real::close);
    if !sound(found) {
        found = hook.original.peek();
    }
    if !sound(found) {
        found = real::lookup(libc::RTLD_NEXT, hook.symbol);
    }
    if !sound(found) {
        found = objects::find(|o| {
            let name = o.file_name();
            if !name.starts_with(b"libcudart.so") && !name.starts_with(b"libcudart-") {
                return None;
            }
            let handle = o.handle();
            Some(real::lookup(handle, hook.symbol)).filter(|f| !handle.is_null() && sound(*f))
        })
        .unwrap_or(std::ptr::null_mut());
    }
    if !sound(found) {
        return std::ptr::null_mut();
    }
    objects::keep(found as usize);
    if let Some(place) = place {
        place.store(found, Ordering::Relaxed);
    }
    found
}
