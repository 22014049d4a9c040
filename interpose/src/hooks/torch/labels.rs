//! `torch.profiler.record_function`, and what PyTorch marks with it itself: `Optimizer.step#Adam.step`, `Optimizer.zero_grad#...`,
//! `enumerate(DataLoader)#...`, `ProfilerStep#3`.
//!
//! PyTorch offers a door for that: `at::addGlobalCallback(at::RecordFunctionCallback)`, which libtorch_cpu exports from 2.1 to 2.15.
//! The callback is registered for `RecordScope::USER_SCOPE` alone, so that no operator pays, with the first block that is recorded.
//! That may be under the CUDA allocator's lock; the lock of PyTorch's list of callbacks is held while that list is copied, and by
//! nobody who allocates on a device.
//!
//! What is private here is how the callback is laid out (ATen/record_function.h: two functions, the probability 1.0, one byte a scope,
//! three more), passed in memory. It is checked: PyTorch is asked whom it would call (`at::getStepCallbacksUnlessEmpty`), and must name
//! both of our functions for a user's range and none of them for an operator. Otherwise the callback is taken back.

use std::ffi::{CStr, c_char, c_void};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_trace::definition::{LabelOrigin, Verdict};
use memtrace_trace::event::Action;
use memtrace_trace::ids::StackId;

use super::{exported_by, moment};
use crate::guard::Guard;
use crate::labels::{self, LONGEST, Mark, Moment};
use crate::process::Process;
use crate::real::Original;

/// `at::RecordScope` (a byte): the first one, and users' own.
const FUNCTION: u8 = 0;
const USER_SCOPE: u8 = 7;
const SCOPES: usize = 10;

/// `at::RecordFunctionCallback`.
#[repr(C)]
struct Callback {
    start: unsafe extern "C-unwind" fn(*mut *mut c_void, *const c_void) -> *mut *mut c_void,
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
const SETTLED: u32 = 2;
/// Of this image: a forked child has its parent's PyTorch, with the callback in it.
static STATE: AtomicU32 = AtomicU32::new(NEW);

/// Registers, once. Called outside any guard, when something has been recorded.
#[inline(always)]
pub(super) fn attach() {
    if STATE.load(Ordering::Relaxed) == NEW {
        attach_now();
    }
}

#[cold]
fn attach_now() {
    let begins = || STATE.compare_exchange(NEW, REGISTERING, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    if Process::if_started().is_none() || !begins() {
        return;
    }
    let (verdict, text) = match register() {
        Ok(true) => (Verdict::Works, "record_function verified: PyTorch calls for users' ranges and not for operators"),
        // This thread has switched such callbacks off; another time.
        Ok(false) => return STATE.store(NEW, Ordering::Relaxed),
        Err(why) => (Verdict::Off, why),
    };
    STATE.store(SETTLED, Ordering::Relaxed);
    if let Some(mut guard) = Guard::enter() {
        guard.notice("torch.record_function", verdict, text);
    }
}

/// Whether the callback is registered; not yet, where this thread could not be asked about it.
fn register() -> Result<bool, &'static str> {
    let symbol = |name: &CStr| Some(exported_by(b"libtorch_cpu.so", name)).filter(|address| !address.is_null());
    let find = || Some((symbol(ADD)?, symbol(REMOVE)?, symbol(IS_ENABLED)?, symbol(CALLBACKS)?, symbol(NAME)?));
    let (add, remove, is_enabled, callbacks, _) = find()
        .ok_or("libtorch_cpu lacks a function that registers or checks the callback: no ranges of record_function")?;
    // SAFETY: functions of these signatures in ATen/record_function.h; a trivially copyable class of 40 bytes is passed in memory, and a
    // result that is not trivial is made where the first argument points.
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
        let callbacks: unsafe extern "C-unwind" fn(*mut Answer, u8) -> *mut Answer = std::mem::transmute(callbacks);
        let called = |scope| {
            let mut answer: Answer = [0; ANSWER];
            callbacks(&raw mut answer, scope);
            let ours = [on_start as *const () as u64, on_end as *const () as u64];
            answer.windows(2).any(|pair| pair == ours)
        };
        if called(USER_SCOPE) && !called(FUNCTION) {
            return Ok(true);
        }
        let remove: unsafe extern "C-unwind" fn(u64) = std::mem::transmute(remove);
        remove(handle);
    }
    Err("the callback's layout is not recognised: no ranges of record_function")
}

/// Room for `std::optional<at::StepCallbacks>`, which is about 100 bytes: up to four pairs of functions, which lie in it, and a few
/// numbers. Nothing in it needs to be destroyed.
type Answer = [u64; ANSWER];
const ANSWER: usize = 128;

/// `std::unique_ptr<ObserverContext> (*)(const RecordFunction&)`: always null, for the name says at the end which range it is.
unsafe extern "C-unwind" fn on_start(context: *mut *mut c_void, function: *const c_void) -> *mut *mut c_void {
    // SAFETY: where the caller wants its result.
    unsafe { context.write(std::ptr::null_mut()) };
    // SAFETY: the caller's live object.
    unsafe { tell(Action::RangeStart, function) };
    context
}

/// `void (*)(const RecordFunction&, ObserverContext*)`.
unsafe extern "C-unwind" fn on_end(function: *const c_void, _context: *mut c_void) {
    // SAFETY: as above.
    unsafe { tell(Action::RangeEnd, function) };
}

/// Which optimizer is stepped: a hash of its label and of the stack that steps it.
fn site(label: &[u8], stack: StackId) -> u64 {
    let mut hash = std::hash::DefaultHasher::new();
    (label, stack.0).hash(&mut hash);
    hash.finish()
}

/// # Safety
/// `function` is a live `at::RecordFunction`.
unsafe fn tell(action: Action, function: *const c_void) {
    if Process::if_started().is_none() {
        return;
    }
    static ORIGINAL: Original = Original::new();
    let name = ORIGINAL.get(|| exported_by(b"libtorch_cpu.so", NAME));
    if name.is_null() {
        return;
    }
    // SAFETY: `const char* RecordFunction::name() const`, of a live object: a C string that it owns.
    let text = unsafe {
        let name: unsafe extern "C-unwind" fn(*const c_void) -> *const c_char = std::mem::transmute(name);
        let text = name(function);
        if text.is_null() {
            return;
        }
        std::slice::from_raw_parts(text.cast::<u8>(), libc::strnlen(text, LONGEST))
    };
    let Some(mut guard) = Guard::enter() else { return };
    let mut now = Moment { flags: moment(), ..Moment::default() };
    if action == Action::RangeStart && text.starts_with(b"Optimizer.") {
        now.stack = guard.stack();
    }
    labels::range(&mut guard, action, LabelOrigin::RecordFunction, text, Mark::default(), now);
    // Before it the gradients are there, after it what the optimizer keeps.
    if text.starts_with(b"Optimizer.step#") {
        // Optimizers of one class are told apart by the lines that call them.
        let site = (action == Action::RangeStart).then(|| site(text, now.stack));
        guard.process().names.at_optimizer(site);
    }
}
