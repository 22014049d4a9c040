//! Describes each GPU once, after the process has first allocated memory on it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_trace::api::Api;
use memtrace_trace::definition::Definition;
use memtrace_trace::ids::ModuleId;

use super::driver::call_driver;
use super::limit::{total_in_run, visible_memory_info};
use super::location::current_device;
use super::reading::MAX_DEVICES;
use super::usage;
use crate::linker::original::OriginalFunction;
use crate::recording::device_use;
use crate::recording::guard::Guard;
use crate::recording::observer::Observer;
use crate::recording::slot::Slot;

/// The devices' part of a recording.
pub(crate) const OBSERVER: Observer = Observer::with_state(|_, _| {
    DESCRIBED.set(AtomicU64::new(0));
    usage::start();
});

/// The devices that the recording has described, one bit each.
static DESCRIBED: Slot<AtomicU64> = Slot::new();

/// Bytes that were allocated on each device before it was described.
static ALLOCATED_BEFORE: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];

/// Reports that `bytes` were allocated on a device. The device is described the first time that it is also the calling
/// thread's current device, because the driver reports memory only of that one.
pub(super) fn count_allocated(guard: &mut Guard, device: i16, bytes: u64) {
    let Some(index) = usize::try_from(device).ok().filter(|index| *index < MAX_DEVICES) else { return };
    let Some(described) = DESCRIBED.get() else { return };
    let bit = 1u64 << index;
    if described.load(Ordering::Relaxed) & bit != 0 {
        return;
    }
    device_use::set();
    let Some(counter) = ALLOCATED_BEFORE.get(index) else { return };
    let total = counter.fetch_add(bytes, Ordering::Relaxed) + bytes;
    if device == current_device() && described.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        describe(guard, device, total);
    }
}

/// Describes a device that PyTorch has used before memtrace attached, and reads how much of its memory is in use.
/// `bytes` are those that PyTorch has reserved.
///
/// The driver answers for the current device only, so this thread uses the device's primary context meanwhile.
pub(crate) fn describe_used(guard: &mut Guard, ordinal: i16, bytes: u64) {
    static GET: OriginalFunction = OriginalFunction::new();
    static RETAIN: OriginalFunction = OriginalFunction::new();
    static RELEASE: OriginalFunction = OriginalFunction::new();
    static PUSH: OriginalFunction = OriginalFunction::new();
    static POP: OriginalFunction = OriginalFunction::new();
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
    type Release = unsafe extern "C" fn(c_int) -> c_int;
    type Push = unsafe extern "C" fn(*mut c_void) -> c_int;
    type Pop = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
    let (mut device, mut context) = (0, std::ptr::null_mut());
    // SAFETY: the signatures are those of cuda.h, and all results are writable. The context is active, because PyTorch
    // has memory there. Each call that succeeds is undone.
    unsafe {
        if call_driver(&GET, c"cuDeviceGet", |f: Get| f(&mut device, ordinal.into())) != Some(0)
            || call_driver(&RETAIN, c"cuDevicePrimaryCtxRetain", |f: Retain| f(&mut context, device)) != Some(0)
        {
            return;
        }
        if call_driver(&PUSH, c"cuCtxPushCurrent_v2", |f: Push| f(context)) == Some(0) {
            count_allocated(guard, ordinal, bytes);
            usage::allocated(guard, ordinal, bytes, Api::NONE, ModuleId::NONE);
            call_driver(&POP, c"cuCtxPopCurrent_v2", |f: Pop| f(&mut context));
        }
        call_driver(&RELEASE, c"cuDevicePrimaryCtxRelease_v2", |f: Release| f(device));
    }
}

/// Writes the device's definition. `allocated` is how many of the bytes in use belong to this process.
#[cold]
fn describe(guard: &mut Guard, ordinal: i16, allocated: u64) {
    static GET: OriginalFunction = OriginalFunction::new();
    static NAME: OriginalFunction = OriginalFunction::new();
    static TOTAL: OriginalFunction = OriginalFunction::new();
    static BUS: OriginalFunction = OriginalFunction::new();
    let mut device: c_int = 0;
    let mut name = [0 as c_char; 256];
    let mut bus = [0 as c_char; 32];
    let mut total = 0usize;
    // SAFETY: the signatures are those of cuda.h, and the lengths passed are those of the buffers. None of the
    // functions changes anything, and the context exists, because it is the thread's current one.
    unsafe {
        call_driver(&GET, c"cuDeviceGet", |f: unsafe extern "C" fn(*mut c_int, c_int) -> c_int| {
            f(&mut device, ordinal.into())
        });
        call_driver(&NAME, c"cuDeviceGetName", |f: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int| {
            f(name.as_mut_ptr(), name.len() as c_int - 1, device)
        });
        call_driver(&TOTAL, c"cuDeviceTotalMem_v2", |f: unsafe extern "C" fn(*mut usize, c_int) -> c_int| {
            f(&mut total, device)
        });
        call_driver(&BUS, c"cuDeviceGetPCIBusId", |f: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int| {
            f(bus.as_mut_ptr(), bus.len() as c_int - 1, device)
        });
    }
    let info = visible_memory_info().unwrap_or_default();
    // SAFETY: both buffers are zeroed, and the driver writes at most all bytes but the last, so each ends with a NUL.
    let (name, bus) = unsafe { (CStr::from_ptr(name.as_ptr()), CStr::from_ptr(bus.as_ptr())) };
    guard.define(&Definition::Device {
        ordinal: u32::from(ordinal.unsigned_abs()),
        name: &name.to_string_lossy(),
        total: total_in_run(total as u64),
        used_before: info.total.saturating_sub(info.free).saturating_sub(allocated),
        pci: &bus.to_string_lossy(),
    });
}
