//! The C interface. All functions may be called from any thread that runs Python code.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use memtrace_trace::ids::{FrameId, StackId};

use crate::stack::{DefinitionSink, FrameText, Interner, Loss, Python, Reason, ThreadStacks};

type Detected = Result<Python, Reason>;

// Null until first needed; replaced by `probe_reset` and `probe_forget`. Leaked, as other threads may be using them.
static PYTHON: AtomicPtr<Detected> = AtomicPtr::new(std::ptr::null_mut());
static INTERNER: AtomicPtr<Interner> = AtomicPtr::new(std::ptr::null_mut());
static DEFINITIONS: Mutex<Option<Definitions>> = Mutex::new(None);

thread_local! {
    static STACKS: UnsafeCell<ThreadStacks> = const { UnsafeCell::new(ThreadStacks::new()) };
}

/// Everything that was ever defined, by id.
#[derive(Default)]
struct Definitions {
    frames: HashMap<FrameId, String>,
    stacks: HashMap<StackId, (StackId, FrameId)>,
    /// Definitions of an id that already had one.
    again: u64,
    lost: HashMap<&'static str, u64>,
}

struct Keep;

fn definitions() -> MutexGuard<'static, Option<Definitions>> {
    DEFINITIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DefinitionSink for Keep {
    fn frame(&mut self, id: FrameId, text: &FrameText<'_>) {
        let FrameText { name, qualname, filename, line, first_line } = *text;
        let line = format!("{name}\x1f{qualname}\x1f{filename}\x1f{line}\x1f{first_line}");
        let mut guard = definitions();
        let all = guard.get_or_insert_default();
        all.again += u64::from(all.frames.insert(id, line).is_some());
    }

    fn stack(&mut self, id: StackId, parent: StackId, frame: FrameId) {
        let mut guard = definitions();
        let all = guard.get_or_insert_default();
        all.again += u64::from(all.stacks.insert(id, (parent, frame)).is_some());
    }

    fn lost(&mut self, what: Loss) {
        *definitions().get_or_insert_default().lost.entry(name_of(what)).or_default() += 1;
    }
}

fn name_of(loss: Loss) -> &'static str {
    match loss {
        Loss::Frame => "frame",
        Loss::Depth => "depth",
        Loss::Memory => "memory",
        Loss::Unverified => "unverified",
        Loss::Text => "text",
        Loss::Unwinding => "unwinding",
        Loss::Merging => "merging",
    }
}

/// Takes definitions and forgets them: for measuring.
struct Forget;

impl DefinitionSink for Forget {
    fn frame(&mut self, _id: FrameId, text: &FrameText<'_>) {
        std::hint::black_box(text);
    }

    fn stack(&mut self, id: StackId, _parent: StackId, _frame: FrameId) {
        std::hint::black_box(id);
    }
}

fn resolve(name: &CStr) -> *mut c_void {
    // SAFETY: a C string; the lookup has no other precondition.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

fn python() -> &'static Detected {
    // SAFETY: null or leaked by `probe_reset`.
    match unsafe { PYTHON.load(Ordering::Acquire).as_ref() } {
        Some(python) => python,
        None => {
            probe_reset();
            python()
        }
    }
}

fn interner() -> &'static Interner {
    // SAFETY: null or leaked by `probe_forget`.
    match unsafe { INTERNER.load(Ordering::Acquire).as_ref() } {
        Some(interner) => interner,
        None => {
            probe_forget();
            interner()
        }
    }
}

fn take(sink: &mut impl DefinitionSink) -> StackId {
    let Ok(python) = python() else {
        return StackId::NONE;
    };
    // SAFETY: the reference ends with this call, and a capture does not call back into the probe.
    STACKS.with(|stacks| python.capture(unsafe { &mut *stacks.get() }, interner(), sink))
}

fn verified() -> Result<bool, Reason> {
    python().as_ref().map_err(|reason| *reason)?.verified()
}

/// 0 when stacks are taken, 1 when not yet known, else 2 and `probe_reason` says why not.
#[unsafe(no_mangle)]
pub extern "C" fn probe_state() -> u32 {
    match verified() {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(_) => 2,
    }
}

/// Why not, as text; empty when there is no reason.
///
/// # Safety
/// `into` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_reason(into: *mut c_char, size: usize) -> usize {
    let reason = verified().err().map(|reason| reason.to_string()).unwrap_or_default();
    // SAFETY: as promised by the caller.
    unsafe { copy(&reason, into, size) }
}

/// Takes the calling thread's stack.
#[unsafe(no_mangle)]
pub extern "C" fn probe_capture() -> u32 {
    take(&mut Keep).0
}

/// Writes a stack, innermost frame first: per frame name, qualname, file, line, first line, separated by 0x1f; frames are
/// separated by 0x1e. Returns the length, which may be more than `size`.
///
/// # Safety
/// `into` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_stack(id: u32, into: *mut c_char, size: usize) -> usize {
    // Another thread may have made an id that this one has got, and be about to deliver what it means.
    let text = (0..1_000_000).find_map(|_| {
        let text = text_of(StackId(id));
        if text.is_none() {
            std::thread::yield_now();
        }
        text
    });
    let text = text.unwrap_or_else(|| "undefined\x1e".to_owned());
    // SAFETY: as promised by the caller.
    unsafe { copy(&text, into, size) }
}

/// `None` when something is not defined (yet).
fn text_of(mut id: StackId) -> Option<String> {
    let guard = definitions();
    let mut text = String::new();
    while !id.is_none() {
        let all = guard.as_ref()?;
        let (parent, frame) = all.stacks.get(&id)?;
        let _ = write!(text, "{}\x1e", all.frames.get(frame)?);
        id = *parent;
    }
    Some(text)
}

/// # Safety
/// `into` has room for `size` bytes.
unsafe fn copy(text: &str, into: *mut c_char, size: usize) -> usize {
    // SAFETY: as promised by the caller; the text is not longer than what is copied.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), into.cast(), text.len().min(size)) };
    text.len()
}

/// A count by name: `stacks`, `frames`, `evicted`, `again` (definitions delivered twice), or one of the losses `frame`,
/// `depth`, `memory`, `unverified`, `text`.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_count(name: *const c_char) -> u64 {
    let (stacks, frames, evicted) = interner().counts();
    let guard = definitions();
    // SAFETY: as promised by the caller.
    match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"stacks" => stacks.into(),
        b"frames" => frames.into(),
        b"evicted" => evicted,
        b"again" => guard.as_ref().map_or(0, |all| all.again),
        loss => guard
            .as_ref()
            .and_then(|all| all.lost.iter().find(|(name, _)| name.as_bytes() == loss).map(|(_, count)| *count))
            .unwrap_or(0),
    }
}

/// What a forked child does first: begins anew, without any definition, with an interpreter yet to be verified.
#[unsafe(no_mangle)]
pub extern "C" fn probe_reset() {
    PYTHON.store(Box::into_raw(Box::new(Python::detect(resolve))), Ordering::Release);
    probe_forget();
}

/// Forgets all definitions.
#[unsafe(no_mangle)]
pub extern "C" fn probe_forget() {
    INTERNER.store(Box::into_raw(Box::new(Interner::new())), Ordering::Release);
    *definitions() = None;
}

/// Gives back the calling thread's memory.
#[unsafe(no_mangle)]
pub extern "C" fn probe_release() {
    // SAFETY: no capture is running on this thread.
    STACKS.with(|stacks| unsafe { (*stacks.get()).release() });
}

/// Mean time of a capture of an unchanged stack, in nanoseconds.
#[unsafe(no_mangle)]
pub extern "C" fn probe_time_unchanged(rounds: u32) -> f64 {
    take(&mut Forget);
    let start = Instant::now();
    for _ in 0..rounds {
        std::hint::black_box(take(&mut Forget));
    }
    start.elapsed().as_nanos() as f64 / f64::from(rounds)
}

/// Time of one capture, in nanoseconds, the clock's own share (about 20 ns) included.
#[unsafe(no_mangle)]
pub extern "C" fn probe_time_once() -> f64 {
    let start = Instant::now();
    std::hint::black_box(take(&mut Forget));
    start.elapsed().as_nanos() as f64
}

/// Time of nothing, measured as `probe_time_once` does.
#[unsafe(no_mangle)]
pub extern "C" fn probe_time_nothing() -> f64 {
    let start = Instant::now();
    std::hint::black_box(());
    start.elapsed().as_nanos() as f64
}
