//! The C interface. Any thread that runs Python code may call all functions.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use memtrace_trace::ids::{FrameId, StackId};

use memtrace_stackwalk::{DefinitionSink, FrameText, Interner, Loss, Python, Reason, ThreadStacks};

type Detected = Result<Python, Reason>;

// Null until first used; `probe_reset` and `probe_forget` replace them. The old values leak, because other threads may
// use them.
static PYTHON: AtomicPtr<Detected> = AtomicPtr::new(std::ptr::null_mut());
static INTERNER: AtomicPtr<Interner> = AtomicPtr::new(std::ptr::null_mut());
static DEFINITIONS: Mutex<Option<Definitions>> = Mutex::new(None);

thread_local! {
    static STACKS: UnsafeCell<ThreadStacks> = const { UnsafeCell::new(ThreadStacks::new()) };
}

/// Every definition that the interner delivered, by id.
#[derive(Default)]
struct Definitions {
    frames: HashMap<FrameId, String>,
    stacks: HashMap<StackId, (StackId, FrameId)>,
    /// The number of definitions of an id that already had one.
    again: u64,
    lost: HashMap<&'static str, u64>,
}

struct Collect;

fn definitions() -> MutexGuard<'static, Option<Definitions>> {
    DEFINITIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DefinitionSink for Collect {
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

/// A sink that discards all definitions, for measurements.
struct Discard;

impl DefinitionSink for Discard {
    fn frame(&mut self, _id: FrameId, text: &FrameText<'_>) {
        std::hint::black_box(text);
    }

    fn stack(&mut self, id: StackId, _parent: StackId, _frame: FrameId) {
        std::hint::black_box(id);
    }
}

fn resolve(name: &CStr) -> *mut c_void {
    // SAFETY: `name` is a NUL-terminated string by its type; `dlsym` has no other precondition.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

fn python() -> &'static Detected {
    // SAFETY: the pointer is null or comes from `Box::into_raw` in `probe_reset`, which never frees it.
    match unsafe { PYTHON.load(Ordering::Acquire).as_ref() } {
        Some(python) => python,
        None => {
            probe_reset();
            python()
        }
    }
}

fn interner() -> &'static Interner {
    // SAFETY: the pointer is null or comes from `Box::into_raw` in `probe_forget`, which never frees it.
    match unsafe { INTERNER.load(Ordering::Acquire).as_ref() } {
        Some(interner) => interner,
        None => {
            probe_forget();
            interner()
        }
    }
}

fn capture(sink: &mut impl DefinitionSink) -> StackId {
    let Ok(python) = python() else {
        return StackId::NONE;
    };
    // SAFETY: `STACKS` is thread-local, and a capture does not call back into the probe. So this reference is the only
    // one.
    STACKS.with(|stacks| python.capture(unsafe { &mut *stacks.get() }, interner(), sink))
}

fn verified() -> Result<bool, Reason> {
    python().as_ref().map_err(|reason| *reason)?.verified()
}

/// Returns 0 when stacks are captured and 1 while the interpreter is not verified yet. Otherwise returns 2, and
/// `probe_reason` gives the reason.
#[unsafe(no_mangle)]
pub extern "C" fn probe_state() -> u32 {
    match verified() {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(_) => 2,
    }
}

/// Writes the reason as text, cut to `size` bytes, and returns its full length in bytes; 0 when there is no reason.
///
/// # Safety
/// The caller guarantees that `into` is valid for writing `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_reason(into: *mut c_char, size: usize) -> usize {
    let reason = verified().err().map(|reason| reason.to_string()).unwrap_or_default();
    // SAFETY: the caller guarantees that `into` is valid for writing `size` bytes.
    unsafe { copy(&reason, into, size) }
}

/// Captures the calling thread's stack and returns its id.
#[unsafe(no_mangle)]
pub extern "C" fn probe_capture() -> u32 {
    capture(&mut Collect).0
}

/// Writes a stack, innermost frame first, cut to `size` bytes. A frame has name, qualname, file, line and first line,
/// separated by 0x1f; 0x1e separates frames. Returns the full length in bytes, which may exceed `size`.
///
/// # Safety
/// The caller guarantees that `into` is valid for writing `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_stack(id: u32, into: *mut c_char, size: usize) -> usize {
    // Another thread may have created this id and not delivered its definition yet.
    let text = (0..1_000_000).find_map(|_| {
        let text = text_of(StackId(id));
        if text.is_none() {
            std::thread::yield_now();
        }
        text
    });
    let text = text.unwrap_or_else(|| "undefined\x1e".to_owned());
    // SAFETY: the caller guarantees that `into` is valid for writing `size` bytes.
    unsafe { copy(&text, into, size) }
}

/// The text of a stack, or `None` while a part of it has no definition.
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

/// Copies at most `size` bytes of the text and returns the text's length.
///
/// # Safety
/// The caller guarantees that `into` is valid for writing `size` bytes.
unsafe fn copy(text: &str, into: *mut c_char, size: usize) -> usize {
    // SAFETY: at most `text.len()` bytes are read and at most `size` are written; the caller guarantees room for
    // `size`.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), into.cast(), text.len().min(size)) };
    text.len()
}

/// A count by name: `stacks`, `frames`, `evicted`, `again` (definitions delivered twice), or one of the losses `frame`,
/// `depth`, `memory`, `unverified`, `text`.
///
/// # Safety
/// The caller guarantees that `name` is a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_count(name: *const c_char) -> u64 {
    let (stacks, frames, evicted) = interner().counts();
    let guard = definitions();
    // SAFETY: the caller guarantees that `name` is a NUL-terminated string.
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

/// Starts anew without definitions and with an unverified interpreter. A forked child calls this first.
#[unsafe(no_mangle)]
pub extern "C" fn probe_reset() {
    PYTHON.store(Box::into_raw(Box::new(Python::detect(resolve))), Ordering::Release);
    probe_forget();
}

/// Drops all definitions.
#[unsafe(no_mangle)]
pub extern "C" fn probe_forget() {
    INTERNER.store(Box::into_raw(Box::new(Interner::new())), Ordering::Release);
    *definitions() = None;
}

/// Frees the calling thread's stack cache.
#[unsafe(no_mangle)]
pub extern "C" fn probe_release() {
    // SAFETY: `STACKS` is thread-local, and no capture is running on this thread. So this reference is the only one.
    STACKS.with(|stacks| unsafe { (*stacks.get()).release() });
}

/// The mean time of capturing an unchanged stack, in nanoseconds.
#[unsafe(no_mangle)]
pub extern "C" fn probe_time_unchanged(rounds: u32) -> f64 {
    capture(&mut Discard);
    let start = Instant::now();
    for _ in 0..rounds {
        std::hint::black_box(capture(&mut Discard));
    }
    start.elapsed().as_nanos() as f64 / f64::from(rounds)
}

/// The time of one capture in nanoseconds, including the clock's own cost (about 20 ns).
#[unsafe(no_mangle)]
pub extern "C" fn probe_time_once() -> f64 {
    let start = Instant::now();
    std::hint::black_box(capture(&mut Discard));
    start.elapsed().as_nanos() as f64
}

/// The clock's own cost in nanoseconds, measured as `probe_time_once` does.
#[unsafe(no_mangle)]
pub extern "C" fn probe_time_nothing() -> f64 {
    let start = Instant::now();
    std::hint::black_box(());
    start.elapsed().as_nanos() as f64
}
