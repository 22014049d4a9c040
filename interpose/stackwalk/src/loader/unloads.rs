//! Detects that an object is unloaded, after which its addresses may have another meaning.
//!
//! The `dlclose` hook calls this module before and after the original. Meanwhile no cached fact about addresses is
//! used, because another thread may already be loading an object into the freed range. *Loading* an object needs no
//! notice, because nothing was cached for its addresses before.
//!
//! Before the original runs, [`begin`] waits until no thread reads the loader's structures
//! ([`Reading`](super::reading::Reading)). A read takes microseconds, takes no lock and calls no foreign code, so the
//! wait is short, unless the reader's thread has lost its processor. It is bounded, because a signal handler may have
//! left a read by `siglongjmp`, or may have interrupted one and unload an object itself, and because in a forked child
//! the thread that was reading does not exist.
//!
//! Three cases are not detected: an object that the C library itself unloads (a character set converter), an object
//! that a `dlopen` which fails had loaded (none of its code has run), and generated code that is replaced by other
//! code.

use std::sync::atomic::{
    AtomicU32,
    Ordering::{AcqRel, Acquire, Release, SeqCst},
};

use super::super::lock::wait_while;

static UNLOADING: AtomicU32 = AtomicU32::new(0);
static UNLOADS: AtomicU32 = AtomicU32::new(0);
/// How many threads are reading.
static READERS: AtomicU32 = AtomicU32::new(0);

/// How many times [`begin`] yields the processor while it waits for readers.
const MAX_YIELDS: u32 = 1000;

/// How many times [`begin`] then sleeps, and how long each time, in nanoseconds: 2 s in total. On a busy machine a
/// reader may wait that long for a processor.
const MAX_SLEEPS: u32 = 2000;
const SLEEP_NANOSECONDS: i64 = 1_000_000;

/// How many times objects were unloaded. `None` while one is being unloaded.
#[inline]
pub(crate) fn count() -> Option<u32> {
    // The count is read last, so a reader that sees the end of an unload also sees it counted.
    (UNLOADING.load(Acquire) == 0).then(|| UNLOADS.load(Acquire))
}

/// Reports that `dlclose` is about to run.
pub fn begin() {
    // A reader counts itself and then looks at `UNLOADING`. Both operations are sequentially consistent, so either this
    // function sees the reader or the reader sees that an object is being unloaded.
    UNLOADING.fetch_add(1, SeqCst);
    for wait in 0..MAX_YIELDS + MAX_SLEEPS {
        let readers = READERS.load(SeqCst);
        if readers == 0 {
            return;
        }
        if wait < MAX_YIELDS {
            // SAFETY: `sched_yield` takes no arguments and has no preconditions.
            unsafe { libc::sched_yield() };
        } else {
            // Nobody wakes this thread. A futex, because every program with threads uses them: no seccomp filter
            // forbids it.
            wait_while(&READERS, readers, SLEEP_NANOSECONDS);
        }
    }
    // These readers never end. They are forgotten, so that the next unload does not wait for them.
    READERS.store(0, SeqCst);
}

/// Reports that `dlclose` has returned. `unloaded` says whether the loader has unloaded anything.
pub fn end(unloaded: bool) {
    if unloaded {
        UNLOADS.fetch_add(1, AcqRel);
    }
    UNLOADING.fetch_sub(1, Release);
}

/// Counts this thread as a reader. Returns whether an object is being unloaded, for which nobody waits for this reader.
pub(super) fn begin_reading() -> bool {
    READERS.fetch_add(1, SeqCst);
    UNLOADING.load(SeqCst) != 0
}

/// Ends what [`begin_reading`] has begun.
pub(super) fn end_reading() {
    // `begin` may have forgotten this reader.
    let _ = READERS.fetch_update(SeqCst, SeqCst, |readers| readers.checked_sub(1));
}
