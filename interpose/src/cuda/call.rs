//! One hooked CUDA call, from its entry to its event.
//!
//! An allocation is recorded after its call has returned, a release before its call is made. So no other thread can get
//! the address and record it in between. If a release fails, [`Action::Retract`] cancels its event.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use memtrace_stackwalk::loader::{LoadedObject, Reading, symbol_of_object_and_dependencies};
use memtrace_trace::api::{Api, MemoryKind, OUT_OF_MEMORY};
use memtrace_trace::clock;
use memtrace_trace::counters::Counter;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::ModuleId;

use super::driver::driver_symbol;
use super::hook::{Hook, RUNTIME_HOOKS};
use super::location::{self, current_device};
use super::memory::CallMemory;
use super::{device, entry, pools, usage};
use crate::linker::mapped_object::{MAX_MODULES, MappedObject, containing, module_index};
use crate::linker::original;
use crate::recording::guard::Guard;
use crate::recording::left_frame::stack_pointer;
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
        forget_left_runtime_call();
        let is_nested = !hook.is_runtime() && with_thread_local(|t| t.runtime_depth.get()) > 0;
        let in_allocator = is_allocator_call || is_nested && with_thread_local(|t| t.runtime_in_allocator.get());
        Call { hook, caller, module, in_allocator }
    }

    /// The function that is called.
    pub(super) fn api(&self) -> Api {
        self.hook.api
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
        // No destructor restores these values, because the runtime's C functions do not throw. If a signal handler
        // leaves them by `siglongjmp`, `forget_left_runtime_call` does.
        let outer = with_thread_local(|t| {
            let depth = t.runtime_depth.get();
            if depth == 0 {
                t.runtime_frame.set(stack_pointer());
            }
            t.runtime_depth.set(depth + 1);
            (t.has_nested_call.replace(false), t.runtime_in_allocator.replace(self.in_allocator), depth)
        });
        let result = original();
        let has_nested = with_thread_local(|t| {
            t.runtime_depth.set(outer.2);
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
            // A request for 0 bytes returns no memory.
            return Process::end_first_allocation();
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

    /// Records a call that takes no memory: about a CUDA graph, or about a handle for another process.
    pub(super) fn record_without_memory(&self, action: Action, result: i32, memory: impl FnOnce() -> CallMemory) {
        self.record(action, memory(), result, false);
    }

    /// Records how much memory a pool holds, if that has changed. `location` is the device if this call names it.
    pub(super) fn record_pool_size(&self, pool: u64, location: u64) {
        let totals = pools::changed_totals(pool, location);
        let Some(mut guard) = Guard::enter() else { return };
        let device = location::ordinal(totals.map_or(location, |t| t.location), current_device);
        let growth = totals.map_or(0, |t| t.growth);
        device::count_allocated(&mut guard, device, growth);
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
        if growth > 0 {
            let module = self.module(&mut guard);
            usage::allocated(&mut guard, device, growth, self.hook.api, module);
        }
    }

    /// Reads the memory in use if the call has loaded code.
    pub(super) fn record_load(&self, result: i32) {
        if result == 0 {
            usage::code_loaded(self.hook.api, |guard| self.module(guard));
        }
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
        let is_on_device = action == Action::Alloc && device >= 0;
        let growth = if result == 0 && !has_nested { memory.size } else { 0 };
        if is_on_device && !self.hook.is_pool() {
            device::count_allocated(&mut guard, device, growth);
        }
        let (stack, context) = guard.stack_and_context();
        let seq = guard.emit(Event {
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
        });
        // The reading follows the event whose memory it includes.
        if is_on_device && result == OUT_OF_MEMORY && !has_nested {
            usage::out_of_memory(&mut guard, device, self.hook.api, module);
        } else if is_on_device && growth > 0 && !self.hook.is_pool() {
            usage::allocated(&mut guard, device, growth, self.hook.api, module);
        }
        seq
    }
}

/// Forgets a runtime call that a signal handler has left by `siglongjmp`, so that later driver calls do not count as
/// parts of it.
///
/// A call inside a runtime call is below it on the stack. So a call that is not below it proves that it was left. On a
/// stack of its own, a signal handler's call may be above a runtime call that it has interrupted. That call is no part
/// of the runtime call either.
#[inline]
fn forget_left_runtime_call() {
    with_thread_local(|t| {
        if t.runtime_depth.get() > 0 && stack_pointer() >= t.runtime_frame.get() {
            t.runtime_depth.set(0);
            t.runtime_in_allocator.set(false);
            t.has_nested_call.set(false);
        }
    });
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

/// The function that a driver hook calls. Null if there is none.
pub(super) fn driver_original(hook: &'static Hook) -> *mut c_void {
    hook.original.get_or_find(|| other_interposer(hook).unwrap_or_else(|| driver_symbol(hook.symbol)))
}

/// The function of another library that interposes the same symbol and is searched after us. The program would call it
/// without us, so it becomes the original.
///
/// It was preloaded, or the program has loaded it with `RTLD_GLOBAL`.
fn other_interposer(hook: &Hook) -> Option<*mut c_void> {
    let preloaded = original::next_at_startup(hook.symbol).map(|next| next.address);
    not_of_cuda(preloaded.map_or_else(|| hook.next.get(), std::ptr::with_exposed_provenance_mut))
}

/// The function of this name in a preloaded library that is searched after us. `None` if that is CUDA's own.
pub(super) fn preloaded_function(symbol: &CStr) -> Option<*mut c_void> {
    not_of_cuda(std::ptr::with_exposed_provenance_mut(original::next_at_startup(symbol)?.address))
}

fn not_of_cuda(function: *mut c_void) -> Option<*mut c_void> {
    let object = containing(function.addr())?;
    (!is_cuda_library(object.file_name())).then_some(function)
}

/// Whether this file is the CUDA driver or the CUDA runtime.
pub(super) fn is_cuda_library(file_name: &[u8]) -> bool {
    is_runtime_library(file_name) || file_name.starts_with(b"libcuda.so")
}

fn is_runtime_library(file_name: &[u8]) -> bool {
    file_name.starts_with(b"libcudart.so") || file_name.starts_with(b"libcudart-")
}

/// The originals of runtime functions, by hook and calling module. A process may contain several runtimes, and each
/// caller uses its own.
static RUNTIME_ORIGINALS: [[AtomicPtr<c_void>; MAX_MODULES]; RUNTIME_HOOKS] =
    [const { [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_MODULES] }; RUNTIME_HOOKS];

/// Forgets the originals of runtime functions, because an object was unloaded.
#[cold]
pub(super) fn forget_runtime_originals() {
    for original in RUNTIME_ORIGINALS.iter().flatten() {
        // A store to a page that was never written would take memory.
        if !original.load(Ordering::Relaxed).is_null() {
            original.store(std::ptr::null_mut(), Ordering::Relaxed);
        }
    }
}

#[inline]
fn runtime_original(hook: &'static Hook, caller: Option<&MappedObject>, module: Option<usize>) -> *mut c_void {
    let slot = module.and_then(|module| RUNTIME_ORIGINALS.get(hook.runtime_index())?.get(module));
    if let Some(known) = slot.map(|p| p.load(Ordering::Relaxed)).filter(|p| !p.is_null()) {
        return known;
    }
    let found = find_runtime_original(hook, caller);
    if let Some(slot) = slot {
        slot.store(found, Ordering::Relaxed);
    }
    found
}

/// The function that the caller would call without us. Null if there is none.
///
/// The order of the search:
/// 1. another interposer's function;
/// 2. the function that the caller is linked with;
/// 3. the function that `dlsym` returned to the program;
/// 4. the executable's function;
/// 5. the function of any loaded runtime.
#[cold]
fn find_runtime_original(hook: &'static Hook, caller: Option<&MappedObject>) -> *mut c_void {
    let ours = hook.entry as *mut c_void;
    let is_usable = |found: &*mut c_void| !found.is_null() && *found != ours;
    let usable = |address: usize| Some(std::ptr::with_exposed_provenance_mut(address)).filter(is_usable);
    if let Some(found) = other_interposer(hook).filter(is_usable) {
        return found;
    }
    let reading = Reading::begin();
    // The symbol of the first object that `matches`, or of its dependencies.
    let find = |matches: &dyn Fn(&CStr, &[u8]) -> bool| {
        let is_match = |object: &LoadedObject| {
            object.with_path(&reading, |path| object.with_file_name(&reading, |name| matches(path, name)))
        };
        let symbol = |object| symbol_of_object_and_dependencies(&reading, &object, hook.symbol);
        reading.objects().filter(is_match).find_map(|object| usable(symbol(object)))
    };
    let caller_path = caller.map(MappedObject::path).filter(|path| !path.is_empty());
    caller_path
        .and_then(|caller| find(&|path, _| path == caller))
        .or_else(|| Some(hook.original.get()).filter(is_usable))
        .or_else(|| usable(original::next_at_startup(hook.symbol)?.address))
        .or_else(|| find(&|_, name| is_runtime_library(name)))
        .unwrap_or_default()
}
