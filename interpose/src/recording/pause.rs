//! The functions with which a program pauses its recording.

use memtrace_trace::definition::NoticeStatus;

use super::guard::Guard;
use super::paused::set_paused;

/// Pauses the recording until [`memtrace_resume`]. For programs that call it themselves:
/// `ctypes.CDLL(None).memtrace_pause()`.
///
/// The trace contains a notice. Allocations and frees during the pause are unknown, so every callback meanwhile counts
/// as a lost event. That count is too high rather than too low.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn memtrace_pause() {
    if let Some(mut guard) = Guard::enter() {
        guard.notice(
            "pause",
            NoticeStatus::Remark,
            "the program paused the recording: events until it resumes are not in this trace",
        );
    }
    set_paused(true);
}

/// Resumes a recording that [`memtrace_pause`] has paused.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn memtrace_resume() {
    set_paused(false);
    if let Some(mut guard) = Guard::enter() {
        guard.notice("pause", NoticeStatus::Remark, "the program resumed the recording");
    }
}
