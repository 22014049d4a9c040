//! One reading of the memory in use on a device: what the driver reports, and its event.

use std::ffi::{CStr, c_int};

use memtrace_trace::api::Api;
use memtrace_trace::event::{Action, Event, Source, UsageOccasion};
use memtrace_trace::ids::ModuleId;

use super::driver::call_driver;
use crate::linker::original::OriginalFunction;

/// How many devices have readings.
pub(super) const MAX_DEVICES: usize = 64;

/// The call that was the occasion of a reading.
#[derive(Clone, Copy)]
pub(super) struct Cause {
    pub(super) occasion: UsageOccasion,
    pub(super) api: Api,
    pub(super) module: ModuleId,
}

/// The event of a reading.
pub(super) fn event(device: i16, cause: Cause, info: MemoryInfo) -> Event {
    Event {
        addr: info.free,
        size: info.total,
        stream: cause.occasion as u64,
        source: Source::Driver,
        action: Action::DeviceUsage,
        device,
        api: cause.api,
        module: cause.module,
        ..Event::EMPTY
    }
}

/// What the driver reports about a device's memory, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct MemoryInfo {
    pub(super) free: u64,
    pub(super) total: u64,
}

/// What the driver reports about the calling thread's current device. `None` if it does not answer.
///
/// The thread is in the relaxed capture mode meanwhile. So the call cannot invalidate a capture of a CUDA graph.
pub(super) fn memory_info() -> Option<MemoryInfo> {
    /// `CU_STREAM_CAPTURE_MODE_RELAXED` of cuda.h.
    const RELAXED: c_int = 2;
    let mut mode = RELAXED;
    let is_relaxed = exchange_capture_mode(&mut mode);
    let info = memory_info_in_capture_mode();
    if is_relaxed {
        exchange_capture_mode(&mut mode);
    }
    info
}

/// As [`memory_info`], in the capture mode that the thread has.
pub(super) fn memory_info_in_capture_mode() -> Option<MemoryInfo> {
    static INFO: OriginalFunction = OriginalFunction::new();
    let (mut free, mut total) = (0usize, 0usize);
    let name: &CStr = c"cuMemGetInfo_v2";
    // SAFETY: cuda.h declares `CUresult cuMemGetInfo_v2(size_t *, size_t *)`. Both are writable.
    let result = unsafe {
        call_driver(&INFO, name, |info: unsafe extern "C" fn(*mut usize, *mut usize) -> c_int| {
            info(&mut free, &mut total)
        })
    };
    (result == Some(0)).then_some(MemoryInfo { free: free as u64, total: total as u64 })
}

/// Exchanges the calling thread's capture mode with `mode`. Returns whether the driver did.
fn exchange_capture_mode(mode: &mut c_int) -> bool {
    static EXCHANGE: OriginalFunction = OriginalFunction::new();
    // SAFETY: cuda.h declares `CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *)`, and `mode` is
    // writable.
    let result = unsafe {
        call_driver(
            &EXCHANGE,
            c"cuThreadExchangeStreamCaptureMode",
            |exchange: unsafe extern "C" fn(*mut c_int) -> c_int| exchange(mode),
        )
    };
    result == Some(0)
}
