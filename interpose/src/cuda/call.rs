//! One hooked CUDA call, from its entry to its event.
//!
//! An allocation is recorded after its call has returned, a release before its call is made. So no other thread can get
//! the address and record it in between. If a release fails, [`Action::Retract`] cancels its event.

use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use memtrace_trace::api::MemoryKind;
use memtrace_trace::clock;
use memtrace_trace::counters::Counter;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::ModuleId;

use super::driver::driver;
use super::hook::{Hook, MAX_RUNTIME_HOOKS};
use super::location::{self, current_device};
use super::memory::CallMemory;
use super::{device, entry, pools};
use crate::linker::mapped_object::{MAX_MODULES, MappedObject, containing, keep_loaded, module_index};
use crate::linker::original;
use crate::linker::shared_objects;
use crate::recording::guard::Guard;
use crate::recording::process::Process;
use crate::recording::thread_local::{LastSegment, with_thread_local};
use crate::torch::flags::current_flags;
use crate::torch::{libraries, tracker};

/// `CUDA_ERROR_UNKNOWN` and `cudaErrorUnknown`: the result of a call whose original cannot be found.
pub(super) const ERROR_UNKNOWN: i32 = 999;

/// A call in progress.
pub(super) struct Call {
    hook: &'static Hook,
    caller: Option<MappedObject>,
    /// The caller's index among the objects that call CUDA.
    module: Option<usize>,
    /// Whether PyTorch's caching allocator makes this call, for one of its segments.
    in_allocator: bool,
}

impl Call {
    /// Starts a call. It must come first in a body, because the next stub overwrites the caller's address.
    #[inline]
    pub(super) fn begin(hook: &'static Hook) -> Call {
        let caller = containing(entry::caller());
        let module = caller.as_ref().and_then(module_index);
        let is_allocator_call = caller.is_some_and(|c| is_allocator(&c, module));
        if is_allocator_call {
            tracker::attach();
        }
        let is_nested = !hook.is_runtime() && with_thread_local(|t| t.runtime_depth.get()) > 0;
        let in_allocator = is_allocator_call || is_nested && with_thread_local(|t| t.runtime_in_allocator.get());
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
    pub(super) fn run(&self, original: impl FnOnce() -> i32) -> (i32, bool) {
        if !self.hook.is_runtime() {
            return (original(), false);
        }
        // No destructor restores these values, because the runtime's C functions do not throw.
        let outer = with_thread_local(|t| {
            let outer = (t.has_nested_call.replace(false), t.runtime_in_allocator.replace(self.in_allocator));
            t.runtime_depth.set(t.runtime_depth.get() + 1);
            outer
        });
        let result = original();
        let has_nested = with_thread_local(|t| {
            t.runtime_depth.set(t.runtime_depth.get() - 1);
            t.runtime_in_allocator.set(outer.1);
            t.has_nested_call.replace(outer.0)
        });
        (result, has_nested)
    }

    /// Records the memory that the call allocated, or that the call failed.
    pub(super) fn record_allocation(
        &self,
        action: Action,
        result: i32,
        has_nested: bool,
        memory: impl FnOnce() -> CallMemory,
    ) {
        let mut memory = memory();
        if result == 0 && memory.addr == 0 {
            return; // A request for 0 bytes returns no memory.
        }
        if result == 0 && memory.location == 0 {
            memory.location = match self.hook.api.memory_kind() {
                Some(MemoryKind::Pool) => location::of_address(memory.addr),
                // A mapping is on the device of its physical memory.
                Some(MemoryKind::Address) if action == Action::Map => location::of_handle(memory.stream),
                _ => 0,
            };
        }
        let takes_device_memory = result == 0 && action != Action::Reserve && !self.hook.is_host();
        // Of a runtime call and the driver calls inside it, only the outer one is examined.
        let outer = self.hook.is_runtime() || with_thread_local(|t| t.runtime_depth.get()) == 0;
        let is_caused_by_allocator = || outer && tracker::attach_through_other(self.hook.is_pool());
        if takes_device_memory && (self.in_allocator || is_caused_by_allocator()) {
            let segment = LastSegment { addr: memory.addr, size: memory.size, since: clock::now() };
            with_thread_local(|t| t.last_segment.set(segment));
        }
        self.record(action, memory, result, has_nested);
        if result == 0 && self.hook.is_pool() && !self.hook.is_runtime() {
            self.record_pool_size(pools::of_address(memory.addr), memory.location);
        }
    }

    /// Records a release before it is made. Returns the event's number for [`Self::retract`], 0 if there is none.
    pub(super) fn record_release(&self, action: Action, mut memory: CallMemory) -> u64 {
        if memory.addr == 0 {
            return 0;
        }
        memory.location = match self.hook.api.memory_kind() {
            Some(MemoryKind::Physical) => location::of_handle(memory.addr),
            Some(MemoryKind::Device | MemoryKind::Managed | MemoryKind::Pool | MemoryKind::Imported) => {
                location::of_address(memory.addr)
            }
            Some(MemoryKind::Address) if action == Action::Unmap => location::of_address(memory.addr),
            _ => 0,
        };
        self.record(action, memory, 0, false)
    }

    /// Records how much memory a pool holds, if that has changed. `location` is the device if this call names it.
    pub(super) fn record_pool_size(&self, pool: u64, location: u64) {
        let totals = pools::changed_totals(pool, location);
        let Some(mut guard) = Guard::enter() else { return };
        let device = location::ordinal(totals.map_or(location, |t| t.location), current_device);
        if let Some(totals) = totals {
            let flags = if with_thread_local(|t| t.runtime_depth.get()) > 0 { Flags::NESTED } else { Flags::default() };
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
        device::count_allocated(&mut guard, device, totals.map_or(0, |t| t.growth));
    }

    /// Cancels the recorded release `seq`, because its call failed.
    pub(super) fn retract(&self, seq: u64, result: i32) {
        if seq != 0 {
            self.record(Action::Retract, CallMemory { addr: seq, ..CallMemory::default() }, result, false);
        }
    }

    fn module(&self, guard: &mut Guard) -> ModuleId {
        let known = self.caller.as_ref().zip(self.module);
        known.map_or(ModuleId::NONE, |(caller, index)| guard.module_id(caller, index))
    }

    fn record(&self, action: Action, memory: CallMemory, result: i32, has_nested: bool) -> u64 {
        let Some(mut guard) = Guard::enter() else { return 0 };
        let mut flags = current_flags();
        if self.in_allocator {
            flags = flags.with(Flags::IN_ALLOCATOR);
        }
        if has_nested {
            flags = flags.with(Flags::HAS_NESTED);
        }
        if !self.hook.is_runtime() && with_thread_local(|t| t.runtime_depth.get()) > 0 {
            flags = flags.with(Flags::NESTED);
            with_thread_local(|t| t.has_nested_call.set(true));
        }
        let module = self.module(&mut guard);
        let device = match self.hook.api.memory_kind() {
            // An address range belongs to no device.
            Some(MemoryKind::Address) if memory.location == 0 => -1,
            _ if self.hook.is_host() => -1,
            _ => location::ordinal(memory.location, current_device),
        };
        // An allocation from a pool takes device memory only when the pool grows.
        if action == Action::Alloc && device >= 0 && !self.hook.is_pool() {
            let counts = result == 0 && !has_nested;
            device::count_allocated(&mut guard, device, if counts { memory.size } else { 0 });
        }
        let (stack, context) = guard.stack_and_context();
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
fn is_allocator(caller: &MappedObject, module: Option<usize>) -> bool {
    const NO: u8 = 1;
    const YES: u8 = 2;
    static IS_ALLOCATOR: [AtomicU8; MAX_MODULES] = [const { AtomicU8::new(0) }; MAX_MODULES];
    let known = module.and_then(|module| IS_ALLOCATOR.get(module));
    match known.map_or(0, |known| known.load(Ordering::Relaxed)) {
        0 => {
            let is_allocator = libraries::is_allocator(caller.file_name());
            known.inspect(|known| known.store(if is_allocator { YES } else { NO }, Ordering::Relaxed));
            is_allocator
        }
        known => known == YES,
    }
}

fn driver_original(hook: &Hook) -> *mut c_void {
    hook.original.get_or_find(|| {
        let driver = driver();
        other_interposer(hook)
            .or_else(|| (!driver.is_null()).then(|| original::lookup(driver, hook.symbol)))
            .unwrap_or_default()
    })
}

/// The function of another library that interposes the same symbol and was preloaded after us. The program would call
/// it without us, so it becomes the original.
fn other_interposer(hook: &Hook) -> Option<*mut c_void> {
    let found = original::lookup(libc::RTLD_NEXT, hook.symbol);
    let object = containing(found as usize)?;
    let is_cuda_library =
        [&b"libcuda.so"[..], b"libcudart.so", b"libcudart-"].iter().any(|n| object.file_name().starts_with(n));
    (!is_cuda_library && !found.is_null()).then_some(found)
}

/// The originals of runtime functions, by hook and calling module. A process may contain several runtimes, and each
/// caller uses its own.
static RUNTIME_ORIGINALS: [[AtomicPtr<c_void>; MAX_MODULES]; MAX_RUNTIME_HOOKS] =
    [const { [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_MODULES] }; MAX_RUNTIME_HOOKS];

fn runtime_original(hook: &'static Hook, caller: Option<&MappedObject>, module: Option<usize>) -> *mut c_void {
    let slot = module.and_then(|module| RUNTIME_ORIGINALS.get(hook.runtime_index())?.get(module));
    if let Some(known) = slot.map(|p| p.load(Ordering::Relaxed)).filter(|p| !p.is_null()) {
        return known;
    }
    let ours = hook.entry as *mut c_void;
    let is_usable = |found: *mut c_void| !found.is_null() && found != ours;
    // The order of the search:
    // 1. another interposer's function;
    // 2. the function that the caller is linked with;
    // 3. the function that `dlsym` returned to the program;
    // 4. the executable's function;
    // 5. the function of any loaded runtime.
    let caller_handle = caller
        .map(|c| original::open_loaded(c.path()))
        .filter(|h| !h.is_null() && !caller.is_some_and(|c| c.path().is_empty()));
    let mut found = other_interposer(hook).unwrap_or_default();
    if !is_usable(found) {
        found = caller_handle.map_or(std::ptr::null_mut(), |handle| original::lookup(handle, hook.symbol));
    }
    caller_handle.into_iter().for_each(original::close);
    if !is_usable(found) {
        found = hook.original.get();
    }
    if !is_usable(found) {
        found = original::lookup(libc::RTLD_NEXT, hook.symbol);
    }
    if !is_usable(found) {
        found = shared_objects::find_map(|o| {
            let name = o.file_name();
            if !name.starts_with(b"libcudart.so") && !name.starts_with(b"libcudart-") {
                return None;
            }
            Some(original::exported_by_object(o, hook.symbol)).filter(|f| is_usable(*f))
        })
        .unwrap_or(std::ptr::null_mut());
    }
    if !is_usable(found) {
        return std::ptr::null_mut();
    }
    keep_loaded(found as usize);
    if let Some(slot) = slot {
        slot.store(found, Ordering::Relaxed);
    }
    found
}
