//! Whether recording is paused or has ended.

use std::sync::atomic::{AtomicU8, Ordering};

const RECORDING: u8 = 0;
/// The program has paused the recording, or it has ended. Events are lost, and counted.
const PAUSED: u8 = 1;
/// memtrace is not attached to this process, or not yet. No events are expected.
const DETACHED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(RECORDING);

/// Whether recording is paused or has ended.
#[inline(always)]
pub(crate) fn is_paused() -> bool {
    STATE.load(Ordering::Relaxed) != RECORDING
}

/// Whether memtrace is not attached, so that an event that is not recorded is not lost.
pub(super) fn is_detached() -> bool {
    STATE.load(Ordering::Relaxed) == DETACHED
}

/// Pauses the recording, or resumes it. Nothing happens in a process that is not attached any more.
pub(super) fn set_paused(is_paused: bool) {
    let (from, to) = if is_paused { (RECORDING, PAUSED) } else { (PAUSED, RECORDING) };
    let _ = STATE.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
}

/// Begins or ends the recording of a process that memtrace attaches to.
pub(crate) fn set_detached(is_detached: bool) {
    STATE.store(if is_detached { DETACHED } else { RECORDING }, Ordering::Relaxed);
}

/// Ends the recording of this process for good, with the flag of a pause. Returns `true` for the one caller
/// that does so.
pub(super) fn end_recording() -> bool {
    STATE.compare_exchange(RECORDING, PAUSED, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}
