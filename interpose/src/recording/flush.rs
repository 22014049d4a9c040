//! The functions with which a program reads its own recording while it runs: they wait for the trace file, and name it.
//!
//! The launcher writes events in batches. [`memtrace_flush`] asks it, through the segment's header, to write what has
//! been published, and waits for the answer for a limited time. No lock is held meanwhile.

use std::ffi::{c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::bounded_wait::BoundedWait;
use super::cancellation::NoCancellation;
use super::connect::has_launcher_ended;
use super::errno::RestoreErrno;
use super::guard::Guard;
use super::paused::is_paused;
use super::process::{Process, session_options};

/// All events are in the trace file.
const FLUSHED: c_int = 0;
/// This process has recorded no event.
const NO_EVENTS: c_int = 1;
/// The launcher has not written them in time.
const TIMED_OUT: c_int = 2;
/// The launcher writes no more: it has ended, or the trace file cannot be written.
const ENDED: c_int = 3;

/// How many pauses pass between two checks of whether the launcher still exists.
const LAUNCHER_CHECK_INTERVAL: u32 = 256;

/// Waits until every event that was published before this call is in the trace file, at most this long. Returns
/// [`FLUSHED`], [`NO_EVENTS`], [`TIMED_OUT`] or [`ENDED`].
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn memtrace_flush(timeout_ms: u32) -> c_int {
    let Some(process) = Process::if_started() else { return NO_EVENTS };
    let _errno = RestoreErrno::new();
    let _no_cancellation = NoCancellation::new();
    if !is_paused()
        && let Some(mut guard) = Guard::enter()
    {
        guard.publish();
    }
    let header = process.segment.header();
    // Release: the launcher that sees this request also sees all that was published before it.
    let request = header.flushes_requested.0.fetch_add(1, Ordering::Release).wrapping_add(1);
    let mut wait = BoundedWait::new(Duration::from_millis(timeout_ms.into()));
    let mut pauses = 0u32;
    loop {
        if header.flushes_done.load(Ordering::Acquire) >= request {
            return FLUSHED;
        }
        if header.closed.0.load(Ordering::Relaxed) != 0 {
            return ENDED;
        }
        if !wait.pause() {
            return TIMED_OUT;
        }
        pauses = pauses.wrapping_add(1);
        if pauses.is_multiple_of(LAUNCHER_CHECK_INTERVAL) && has_launcher_ended() {
            return ENDED;
        }
    }
}

/// Whether events of this process are recorded now: 1, or 0 if the recording is paused or has ended, or if this process
/// is not recorded.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn memtrace_is_recording() -> c_int {
    let _errno = RestoreErrno::new();
    let is_closed = || Process::if_started().is_some_and(|p| p.segment.header().closed.0.load(Ordering::Relaxed) != 0);
    c_int::from(!is_paused() && !Process::is_never_recorded() && session_options().is_some() && !is_closed())
}

/// Writes the path of the run folder into `buffer`, followed by 0. Returns its length without the 0. If that is not
/// less than `size`, nothing was written. 0: the process has no run folder.
///
/// # Safety
///
/// `buffer` is writable for `size` bytes.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn memtrace_run_folder(buffer: *mut c_char, size: usize) -> usize {
    let _errno = RestoreErrno::new();
    let folder = session_options().and_then(|options| options.folder);
    let path = folder.as_ref().map_or(&[][..], |path| path.as_os_str().as_bytes());
    // SAFETY: the caller guarantees the buffer.
    unsafe { write_string(path, buffer, size) }
}

/// [`memtrace_run_folder`] for the path of this process's trace file. 0: the process has recorded no event.
///
/// # Safety
///
/// `buffer` is writable for `size` bytes.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn memtrace_trace_file(buffer: *mut c_char, size: usize) -> usize {
    let _errno = RestoreErrno::new();
    let path = Process::if_started().and_then(|process| {
        let header = process.segment.header();
        let (pid, image) = (header.trace_pid.load(Ordering::Relaxed), header.trace_image.load(Ordering::Relaxed));
        let name = if image == 0 { format!("{pid}.mtr") } else { format!("{pid}.{image}.mtr") };
        Some(process.options.folder.as_ref()?.join(name))
    });
    let path = path.as_ref().map_or(&[][..], |path| path.as_os_str().as_bytes());
    // SAFETY: the caller guarantees the buffer.
    unsafe { write_string(path, buffer, size) }
}

/// # Safety
///
/// `buffer` is writable for `size` bytes.
unsafe fn write_string(bytes: &[u8], buffer: *mut c_char, size: usize) -> usize {
    if bytes.len() < size && !buffer.is_null() {
        // SAFETY: the buffer has space for the bytes and the 0 that ends them, and is not part of `bytes`.
        unsafe {
            buffer.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            buffer.add(bytes.len()).write(0);
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_written_only_if_it_fits() {
        let mut buffer = [b'?' as c_char; 4];
        // SAFETY: the buffer is writable for the sizes passed.
        unsafe {
            assert_eq!(write_string(b"/run", buffer.as_mut_ptr(), 4), 4);
            assert_eq!(buffer, [b'?' as c_char; 4]);
            assert_eq!(write_string(b"/r", buffer.as_mut_ptr(), 4), 2);
            assert_eq!(write_string(b"/r", std::ptr::null_mut(), 0), 2);
        }
        assert_eq!(buffer.map(|c| c as u8), [b'/', b'r', 0, b'?']);
    }

    #[test]
    fn a_process_without_events_has_nothing_to_write() {
        assert_eq!(memtrace_flush(60_000), NO_EVENTS);
        assert_eq!(memtrace_is_recording(), 0);
    }
}
