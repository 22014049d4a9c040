//! Records a process that was running before this library was loaded (`memtrace attach`).
//!
//! The launcher makes a thread of the program load the library, and one call [`memtrace_attach`], which starts a thread
//! of ours and returns. That thread redirects the program's calls, writes the state that is there ([`prior_state`]) and
//! waits until the launcher ends the recording or has ended itself. Then it restores everything, and ends.
//!
//! PyTorch cannot forget a tracker, so the library stays loaded. Nothing is recorded any more, and the next attachment
//! uses it again.

mod prior_state;
mod thread;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memtrace_stackwalk::loader::set_loaded_late;
use memtrace_trace::definition::NoticeStatus;
use memtrace_trace::options::Options;

use crate::cuda::{device, lookup};
use crate::linker::redirect;
use crate::recording::attached;
use crate::recording::bounded_wait::BoundedWait;
use crate::recording::connect::has_launcher_ended;
use crate::recording::guard::{Guard, reserve_ring};
use crate::recording::paused::set_detached;
use crate::recording::process::Process;
use crate::torch::{gate, hooked, record_function, reporter};

use self::prior_state::PriorState;
use self::thread::{set_name, start};

/// The topic of our notices.
const TOPIC: &str = "attach";

/// The results of [`memtrace_attach`], which the launcher knows.
const STARTED: c_int = 0;
const RECORDED_ALREADY: c_int = 1;
const BAD_OPTIONS: c_int = 2;
const NO_THREAD: c_int = 3;

/// How often to look whether the launcher still exists.
const LAUNCHER_CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// How long hooks that have begun to write an event may take.
const HOOKS_END: Duration = Duration::from_millis(20);

/// [`IS_READY`] when [`memtrace_attach`] may be called. The launcher reads it.
#[cfg_attr(not(test), unsafe(export_name = "memtrace_attach_ready"))]
static READY: AtomicU64 = AtomicU64::new(0);
const IS_READY: u64 = u64::from_le_bytes(*b"MEMTRACE");
/// The result of the latest call of [`memtrace_attach`] in the low half, and the call's number in the high one. The
/// launcher reads it.
#[cfg_attr(not(test), unsafe(export_name = "memtrace_attach_answer"))]
static ANSWER: AtomicU64 = AtomicU64::new(0);

/// The constructor. All relocations are done when it runs. It calls no function of the C library, because a sanitizer's
/// runtime may not be initialized yet.
extern "C" fn set_ready() {
    READY.store(IS_READY, Ordering::Release);
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = set_ready;

/// Starts the recording. `options` is the text of [`Options::encode`], `number` that of the call.
///
/// # Safety
///
/// `options` is a C string.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn memtrace_attach(options: *const c_char, number: u64) -> c_int {
    // SAFETY: the caller guarantees a C string.
    let result = unsafe { begin(options) };
    ANSWER.store(number << 32 | result as u64, Ordering::Release);
    result
}

/// # Safety
///
/// `options` is a C string.
unsafe fn begin(options: *const c_char) -> c_int {
    // SAFETY: the caller guarantees a C string.
    let options = unsafe { CStr::from_ptr(options) }.to_str().ok().and_then(Options::parse);
    let Some(options) = options else { return BAD_OPTIONS };
    set_loaded_late();
    if Process::if_started().is_some_and(|process| process.segment.header().closed.0.load(Ordering::Relaxed) == 0)
        || !attached::set(options)
    {
        return RECORDED_ALREADY;
    }
    // Nothing is recorded before the state is known.
    set_detached(true);
    if start(control) {
        return STARTED;
    }
    attached::clear();
    NO_THREAD
}

/// The replacement of a function that objects call.
fn replacement(name: &[u8]) -> Option<usize> {
    hooked::replacement(name).or_else(|| lookup::stub(name))
}

/// The thread that controls the recording.
extern "C" fn control(_: *mut c_void) -> *mut c_void {
    set_name(c"memtrace");
    Process::forget();
    reporter::forget_options();
    let Some(process) = Process::current() else {
        attached::clear();
        return null_mut();
    };
    // A ring that another thread leaves meanwhile would have events before the state, which must come first.
    reserve_ring(process);
    gate::close();
    let slots = redirect::redirect_all(replacement);
    let state = prior_state::take();
    write_state(process, &state, slots);
    let header = process.segment.header();
    let word = &header.detach_requested;
    while word.load(Ordering::Acquire) == 0 && !has_launcher_ended() {
        let interval = libc::timespec { tv_sec: 0, tv_nsec: LAUNCHER_CHECK_INTERVAL.subsec_nanos().into() };
        // SAFETY: the word is in the mapped segment, and the time is valid. The call ends early without harm.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, 0, &raw const interval, 0, 0) };
    }
    detach(process);
    null_mut()
}

/// Writes the state that was there, and lets the launcher go on with the events that follow.
fn write_state(process: &Process, state: &Result<PriorState, &'static str>, slots: usize) {
    set_detached(false);
    let mut written = 0;
    if let Some(mut guard) = Guard::enter() {
        if let Ok(state) = state {
            written = prior_state::write(&mut guard, state);
        }
        let text = format!("{slots} calls between libraries are recorded");
        guard.notice(TOPIC, NoticeStatus::Remark, &text);
        match state {
            Ok(state) => {
                for (status, text) in prior_state::notices(state) {
                    guard.notice(TOPIC, status, &text);
                }
            }
            Err(reason) => {
                let text = format!("the memory that was in use before memtrace attached is not known: {reason}");
                guard.notice(TOPIC, NoticeStatus::Off, &text);
            }
        }
    }
    // Release: the launcher that sees this also sees the events.
    process.segment.header().prior_state_end.store(written + 1, Ordering::Release);
    for (device, bytes) in state.iter().flat_map(prior_state::reserved) {
        if let Some(mut guard) = Guard::enter() {
            device::describe_used(&mut guard, device, bytes);
        }
    }
}

/// Ends the recording and restores what was changed.
fn detach(process: &Process) {
    set_detached(true);
    redirect::restore_all();
    record_function::detach();
    // A hook that has begun before publishes its event.
    let mut wait = BoundedWait::new(HOOKS_END);
    while wait.pause() {}
    process.segment.header().is_detached.store(1, Ordering::Release);
    process.leave();
    Process::forget();
    attached::clear();
}
