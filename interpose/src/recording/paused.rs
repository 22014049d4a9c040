//! Whether recording is paused or has ended.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether recording is paused or has ended.
static PAUSED: AtomicBool = AtomicBool::new(false);

/// Whether recording is paused or has ended.
#[inline(always)]
pub(crate) fn is_paused() -> bool {
    PAUSED.load(Ordering::Relaxed)
}

/// Pauses the recording, or resumes it.
pub(super) fn set_paused(is_paused: bool) {
    PAUSED.store(is_paused, Ordering::Relaxed);
}

/// Ends the recording of this process for good, with the flag of a pause. Returns `true` for the one caller
/// that does so.
pub(super) fn end_recording() -> bool {
    !PAUSED.swap(true, Ordering::Relaxed)
}
