//! The options of a recording that began in a running process (`memtrace attach`). The environment does not have them.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use memtrace_trace::options::Options;

/// The options. Null if this process is not attached.
static OPTIONS: AtomicPtr<Options> = AtomicPtr::new(std::ptr::null_mut());
/// The process that was attached to. A forked child inherits the options, and records from its own first event.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// The options, if this process or the one that it was forked from is attached.
pub(super) fn options() -> Option<&'static Options> {
    // SAFETY: the pointer is null or comes from `set`, which leaks its box.
    unsafe { OPTIONS.load(Ordering::Acquire).as_ref() }
}

/// Whether this is the process that was attached to.
pub(crate) fn is_here() -> bool {
    options().is_some() && PROCESS.load(Ordering::Relaxed) == std::process::id()
}

/// Sets the options of a recording. Returns `false` if this process is attached already.
pub(crate) fn set(options: Options) -> bool {
    let new = Box::into_raw(Box::new(options));
    let is_first = OPTIONS.compare_exchange(std::ptr::null_mut(), new, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if is_first {
        PROCESS.store(std::process::id(), Ordering::Relaxed);
    } else {
        // SAFETY: this box was just made, and nobody else has its address.
        drop(unsafe { Box::from_raw(new) });
    }
    is_first
}

/// Forgets the options. They are not freed, because hooks on other threads may read them.
pub(crate) fn clear() {
    OPTIONS.store(std::ptr::null_mut(), Ordering::Release);
}
