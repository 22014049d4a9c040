//! Ranges of `torch.profiler.record_function`, including those that PyTorch itself creates: `Optimizer.step#Adam.step`,
//! `Optimizer.zero_grad#...`, `enumerate(DataLoader)#...`, `ProfilerStep#3`.
//!
//! libtorch_cpu exports `at::addGlobalCallback(at::RecordFunctionCallback)` for this from 2.1 to 2.15. The callback is
//! registered with the first recorded block, for `RecordScope::USER_SCOPE` alone, so that operators cost nothing. This
//! may happen under the CUDA allocator's lock. PyTorch holds the lock of its callback list only while it copies the
//! list, and no thread allocates on a device meanwhile.
//!
//! The callback's layout is private (ATen/record_function.h): two functions, the probability 1.0, one byte for each
//! scope, three more bytes, passed in memory. It is verified with `at::getStepCallbacksUnlessEmpty`, which returns the
//! callbacks that PyTorch would call. Both our functions must be among them for a user's range, and neither for an
//! operator. Otherwise the callback is removed.

use std::ffi::{CStr, c_char, c_void};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memtrace_trace::definition::{LabelOrigin, NoticeStatus};
use memtrace_trace::event::Action;
use memtrace_trace::ids::StackId;

use super::flags::current_flags;
use super::libraries::libtorch_cpu;
use crate::arch;
use crate::linker::original::OriginalFunction;
use crate::linker::shared_objects::exported_by;
use crate::recording::guard::Guard;
use crate::recording::labels::{self, MAX_NAME_BYTES, RangeDetails, RangeKey};
use crate::recording::observer;
use crate::recording::paused::is_paused;
use crate::recording::process::Process;

/// Values of `at::RecordScope`, a byte: operators and users' ranges.
const FUNCTION: u8 = 0;
const USER_SCOPE: u8 = 7;
const SCOPES: usize = 10;

/// `at::RecordFunctionCallback`.
#[repr(C)]
struct Callback {
    start: unsafe extern "C-unwind" fn(),
    end: unsafe extern "C-unwind" fn(*const c_void, *mut c_void),
    probability: f64,
    scopes: [bool; SCOPES],
    needs_inputs: bool,
    needs_outputs: bool,
    needs_ids: bool,
}

const ADD: &CStr = c"_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE";
const REMOVE: &CStr = c"_ZN2at14removeCallbackEm";
const IS_ENABLED: &CStr = c"_ZN2at23isRecordFunctionEnabledEv";
const CALLBACKS: &CStr = c"_ZN2at27getStepCallbacksUnlessEmptyENS_11RecordScopeE";
const NAME: &CStr = c"_ZNK2at14RecordFunction4nameEv";

const NEW: u32 = 0;
const REGISTERING: u32 = 1;
const DONE: u32 = 2;
/// Belongs to the loaded library, not to a recording: a forked child inherits PyTorch with the registered callback.
static STATE: AtomicU32 = AtomicU32::new(NEW);
/// PyTorch's number of the registered callback.
static HANDLE: AtomicU64 = AtomicU64::new(NO_HANDLE);
const NO_HANDLE: u64 = u64::MAX;

/// Registers the callback once. Call it without a guard, after something was recorded.
#[inline(always)]
pub(super) fn attach() {
    if STATE.load(Ordering::Relaxed) == NEW {
        attach_now();
    }
}

#[cold]
fn attach_now() {
    let begin = || STATE.compare_exchange(NEW, REGISTERING, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    if is_paused() || Process::if_started().is_none() || !begin() {
        return;
    }
    let (status, text) = match register() {
        Ok(true) => (NoticeStatus::Works, "record_function verified: PyTorch reports user ranges and no operators"),
        // This thread has disabled such callbacks, so another attempt follows.
        Ok(false) => return STATE.store(NEW, Ordering::Relaxed),
        Err(reason) => (NoticeStatus::Off, reason),
    };
    STATE.store(DONE, Ordering::Relaxed);
    if let Some(mut guard) = Guard::enter() {
        guard.notice("torch.record_function", status, text);
    }
}

/// Removes the callback, so that a later recording registers it anew.
pub(crate) fn detach() {
    let handle = HANDLE.swap(NO_HANDLE, Ordering::Relaxed);
    let remove = exported_by(b"libtorch_cpu.so", REMOVE);
    if handle == NO_HANDLE || remove.is_null() {
        return;
    }
    // SAFETY: `void at::removeCallback(at::CallbackHandle)` has this signature, and the handle is registered.
    unsafe {
        let remove: unsafe extern "C-unwind" fn(u64) = std::mem::transmute(remove);
        remove(handle);
    }
    STATE.store(NEW, Ordering::Relaxed);
}

/// Registers and verifies the callback. `Ok(false)` if callbacks are disabled on this thread, `Err` with the reason if
/// it is not possible.
fn register() -> Result<bool, &'static str> {
    let symbol = |name: &CStr| Some(exported_by(b"libtorch_cpu.so", name)).filter(|address| !address.is_null());
    let find = || Some((symbol(ADD)?, symbol(REMOVE)?, symbol(IS_ENABLED)?, symbol(CALLBACKS)?, symbol(NAME)?));
    let (add, remove, is_enabled, callbacks, _) = find()
        .ok_or("libtorch_cpu lacks a function that registers or checks the callback: no ranges of record_function")?;
    // SAFETY: the functions have these signatures in ATen/record_function.h. A trivially copyable class of 40 bytes is
    // passed in memory.
    unsafe {
        let is_enabled: unsafe extern "C-unwind" fn() -> bool = std::mem::transmute(is_enabled);
        if !is_enabled() {
            return Ok(false);
        }
        let add: unsafe extern "C-unwind" fn(Callback) -> u64 = std::mem::transmute(add);
        let mut scopes = [false; SCOPES];
        if let Some(user) = scopes.get_mut(usize::from(USER_SCOPE)) {
            *user = true;
        }
        let handle = add(Callback {
            start: on_start,
            end: on_end,
            probability: 1.0,
            scopes,
            needs_inputs: false,
            needs_outputs: false,
            needs_ids: false,
        });
        let is_called = |scope| {
            let mut storage: StepCallbacks = [0; STEP_CALLBACKS_WORDS];
            arch::call_constructing(callbacks, (&raw mut storage).cast(), u64::from(scope), 0, 0, 0);
            let ours = [on_start as *const () as u64, on_end as *const () as u64];
            storage.windows(2).any(|pair| pair == ours)
        };
        if is_called(USER_SCOPE) && !is_called(FUNCTION) {
            HANDLE.store(handle, Ordering::Relaxed);
            return Ok(true);
        }
        let remove: unsafe extern "C-unwind" fn(u64) = std::mem::transmute(remove);
        remove(handle);
    }
    Err("the callback's layout is not recognized: no ranges of record_function")
}

/// Storage for a `std::optional<at::StepCallbacks>`. That has about 100 bytes: up to four pairs of functions, stored
/// inline, and a few numbers. It needs no destructor call.
type StepCallbacks = [u64; STEP_CALLBACKS_WORDS];
const STEP_CALLBACKS_WORDS: usize = 128;

/// `std::unique_ptr<ObserverContext> (*)(const RecordFunction&)`. The result is always null: the end of a range is
/// matched by its name.
#[unsafe(naked)]
unsafe extern "C-unwind" fn on_start() {
    arch::construct_result!(range_started)
}

/// [`on_start`] with the address of its result, which it returns.
unsafe extern "C-unwind" fn range_started(context: *mut *mut c_void, function: *const c_void) -> *mut *mut c_void {
    // SAFETY: the caller passes the address of its result (Itanium C++ ABI), which is writable.
    unsafe { context.write(std::ptr::null_mut()) };
    // SAFETY: PyTorch passes a live `RecordFunction`.
    unsafe { record_range(Action::RangeStart, function) };
    context
}

/// `void (*)(const RecordFunction&, ObserverContext*)`.
unsafe extern "C-unwind" fn on_end(function: *const c_void, _context: *mut c_void) {
    // SAFETY: PyTorch passes a live `RecordFunction`.
    unsafe { record_range(Action::RangeEnd, function) };
}

/// Identifies an optimizer by a hash of its label and of the stack that steps it.
fn step_site(label: &[u8], stack: StackId) -> u64 {
    let mut hash = std::hash::DefaultHasher::new();
    (label, stack.0).hash(&mut hash);
    hash.finish()
}

/// # Safety
/// `function` is a live `at::RecordFunction`.
unsafe fn record_range(action: Action, function: *const c_void) {
    if Process::if_started().is_none() {
        return;
    }
    static ORIGINAL: OriginalFunction = OriginalFunction::new();
    let name = libtorch_cpu(&ORIGINAL, NAME);
    if name.is_null() {
        return;
    }
    // SAFETY: `const char* RecordFunction::name() const` has this signature. The caller guarantees a live object, which
    // owns the returned C string.
    let text = unsafe {
        let name: unsafe extern "C-unwind" fn(*const c_void) -> *const c_char = std::mem::transmute(name);
        let text = name(function);
        if text.is_null() {
            return;
        }
        std::slice::from_raw_parts(text.cast::<u8>(), libc::strnlen(text, MAX_NAME_BYTES))
    };
    let Some(mut guard) = Guard::enter() else { return };
    let mut details = RangeDetails { flags: current_flags(), ..RangeDetails::default() };
    if action == Action::RangeStart && text.starts_with(b"Optimizer.") {
        details.stack = guard.stack();
    }
    labels::record_range(&mut guard, action, LabelOrigin::RecordFunction, text, RangeKey::default(), details);
    // At the beginning the gradients exist, at the end the optimizer state does.
    if text.starts_with(b"Optimizer.step#") {
        // Two optimizers of one class are distinguished by the source lines that step them.
        let site = (action == Action::RangeStart).then(|| step_site(text, details.stack));
        observer::optimizer_step(&guard.process().watch, site);
    }
}
