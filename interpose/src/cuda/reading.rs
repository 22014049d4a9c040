//! One reading of the memory in use on a device: what the driver reports, and its event.

use std::ffi::{CStr, c_int};

use memtrace_trace::api::Api;
use memtrace_trace::event::{Action, Event, Source, UsageOccasion};
use memtrace_trace::ids::ModuleId;

use super::driver::call_driver;
use super::location::current_device;
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

/// The driver's figures of a device's memory, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct MemoryInfo {
    pub(super) free: u64,
    pub(super) total: u64,
}

/// The driver's figures of the calling thread's current device. `None` if it does not answer.
///
/// The thread is in the relaxed capture mode meanwhile. So the call cannot invalidate a capture of a CUDA graph.
pub(super) fn memory_info() -> Option<MemoryInfo> {
    let _relaxed = RelaxedCapture::begin();
    memory_info_in_capture_mode()
}

/// [`memory_info`] of any device on which this process has a context. `None` if it has none there.
pub(super) fn device_memory(device: i16) -> Option<MemoryInfo> {
    if current_device() == device {
        return memory_info();
    }
    static RETAIN: OriginalFunction = OriginalFunction::new();
    static RELEASE: OriginalFunction = OriginalFunction::new();
    let ordinal = c_int::from(device);
    let mut context = 0u64;
    if has_primary(ordinal) != Some(true) {
        return None;
    }
    // SAFETY: cuda.h declares `CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice)`, and `context` is writable.
    // The context exists, so none is created.
    let retained = unsafe {
        call_driver(&RETAIN, c"cuDevicePrimaryCtxRetain", |retain: unsafe extern "C" fn(*mut u64, c_int) -> c_int| {
            retain(&mut context, ordinal)
        })
    };
    if retained != Some(0) {
        return None;
    }
    let info = in_context(context, memory_info);
    // SAFETY: cuda.h declares `CUresult cuDevicePrimaryCtxRelease_v2(CUdevice)`. It was retained above.
    unsafe {
        call_driver(&RELEASE, c"cuDevicePrimaryCtxRelease_v2", |release: unsafe extern "C" fn(c_int) -> c_int| {
            release(ordinal)
        });
    }
    info
}

/// Whether the device has its primary context. `None` if the driver does not answer.
pub(super) fn has_primary(device: c_int) -> Option<bool> {
    static GET_STATE: OriginalFunction = OriginalFunction::new();
    let (mut flags, mut is_active) = (0u32, 0);
    // SAFETY: cuda.h declares `CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned int *, int *)`. Both are
    // writable.
    let result = unsafe {
        call_driver(
            &GET_STATE,
            c"cuDevicePrimaryCtxGetState",
            |get: unsafe extern "C" fn(c_int, *mut u32, *mut c_int) -> c_int| get(device, &mut flags, &mut is_active),
        )
    };
    (result == Some(0)).then_some(is_active != 0)
}

/// The result of `read` with this context as the calling thread's current one.
pub(super) fn in_context(context: u64, read: impl FnOnce() -> Option<MemoryInfo>) -> Option<MemoryInfo> {
    static PUSH: OriginalFunction = OriginalFunction::new();
    static POP: OriginalFunction = OriginalFunction::new();
    // SAFETY: cuda.h declares `CUresult cuCtxPushCurrent_v2(CUcontext)`. The driver has just returned this context.
    let pushed =
        unsafe { call_driver(&PUSH, c"cuCtxPushCurrent_v2", |push: unsafe extern "C" fn(u64) -> c_int| push(context)) };
    if pushed != Some(0) {
        return None;
    }
    let info = read();
    let mut popped = 0u64;
    // SAFETY: cuda.h declares `CUresult cuCtxPopCurrent_v2(CUcontext *)`. It removes what was pushed above, so the
    // thread's current context is the program's again.
    unsafe {
        call_driver(&POP, c"cuCtxPopCurrent_v2", |pop: unsafe extern "C" fn(*mut u64) -> c_int| pop(&mut popped));
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

/// While it lives, the thread is in the relaxed capture mode: no call of ours invalidates a capture of a CUDA graph.
pub(super) struct RelaxedCapture {
    /// The mode before. `None` if it could not be changed.
    before: Option<c_int>,
}

impl RelaxedCapture {
    /// Changes the mode.
    pub(super) fn begin() -> RelaxedCapture {
        /// `CU_STREAM_CAPTURE_MODE_RELAXED` of cuda.h.
        const RELAXED: c_int = 2;
        let mut mode = RELAXED;
        RelaxedCapture { before: exchange_capture_mode(&mut mode).then_some(mode) }
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        if let Some(mut mode) = self.before {
            exchange_capture_mode(&mut mode);
        }
    }
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
