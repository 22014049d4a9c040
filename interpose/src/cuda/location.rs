//! Asks the driver where memory is. An allocation is on the calling thread's current device, but any thread may free or
//! map it.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

use super::driver::call_driver;
use super::memory::{AllocationProperties, HOST, location_of};
use crate::linker::original::OriginalFunction;

/// The ordinal of the calling thread's current device, -1 if there is none.
pub(super) fn current_device() -> i16 {
    static GET_DEVICE: OriginalFunction = OriginalFunction::new();
    let mut device = -1;
    // SAFETY: cuda.h declares `CUresult cuCtxGetDevice(CUdevice *)`, and `device` is writable.
    let result = unsafe {
        call_driver(&GET_DEVICE, c"cuCtxGetDevice", |get: unsafe extern "C" fn(*mut c_int) -> c_int| get(&mut device))
    };
    if result == Some(0) { i16::try_from(device).unwrap_or(-1) } else { -1 }
}

/// How many devices the process sees. 0 if the driver does not answer.
fn device_count() -> c_int {
    static GET_COUNT: OriginalFunction = OriginalFunction::new();
    static DEVICE_COUNT: AtomicI32 = AtomicI32::new(0);
    let mut count = DEVICE_COUNT.load(Ordering::Relaxed);
    if count == 0 {
        // SAFETY: cuda.h declares `CUresult cuDeviceGetCount(int *)`, and `count` is writable.
        unsafe {
            call_driver(&GET_COUNT, c"cuDeviceGetCount", |get: unsafe extern "C" fn(*mut c_int) -> c_int| {
                get(&mut count)
            });
        }
        DEVICE_COUNT.store(count, Ordering::Relaxed);
    }
    count
}

/// The location of the device memory at this address, encoded as [`super::memory::CallMemory::location`]. With a single
/// device the driver is not asked.
pub(super) fn of_address(addr: u64) -> u64 {
    /// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL` of cuda.h.
    const DEVICE_ORDINAL: c_int = 9;
    match device_count() {
        count if count < 1 => 0,
        1 => 1,
        _ => pointer_attribute::<c_int>(DEVICE_ORDINAL, addr, -1)
            .and_then(|ordinal| u64::try_from(ordinal).ok())
            .map_or(0, |ordinal| ordinal + 1),
    }
}

/// The location of the physical memory with this handle, encoded as [`super::memory::CallMemory::location`].
pub(super) fn of_handle(handle: u64) -> u64 {
    static GET_PROPERTIES: OriginalFunction = OriginalFunction::new();
    let mut properties = AllocationProperties::default();
    // SAFETY: cuda.h declares `CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *,
    // CUmemGenericAllocationHandle)`. `AllocationProperties` has the size of that structure, and the driver refuses an
    // invalid handle.
    let result = unsafe {
        call_driver(
            &GET_PROPERTIES,
            c"cuMemGetAllocationPropertiesFromHandle",
            |get: unsafe extern "C" fn(*mut AllocationProperties, u64) -> c_int| get(&mut properties, handle),
        )
    };
    if result == Some(0) { location_of(&properties) } else { 0 }
}

/// The device ordinal of a location, -1 for the host. `current` is called if the location is unknown.
pub(super) fn ordinal(location: u64, current: impl FnOnce() -> i16) -> i16 {
    match location {
        0 => current(),
        HOST => -1,
        location => i16::try_from(location - 1).unwrap_or(-1),
    }
}

/// One attribute of an address. `T` must be the attribute's type. `None` if the driver refuses; `empty` only
/// initializes the storage.
pub(super) fn pointer_attribute<T: Copy>(attribute: c_int, addr: u64, empty: T) -> Option<T> {
    static GET_ATTRIBUTE: OriginalFunction = OriginalFunction::new();
    let mut value = empty;
    // SAFETY: cuda.h declares `CUresult cuPointerGetAttribute(void *, CUpointer_attribute, CUdeviceptr)`. Callers
    // choose `T` to match the attribute.
    let result = unsafe {
        call_driver(
            &GET_ATTRIBUTE,
            c"cuPointerGetAttribute",
            |get: unsafe extern "C" fn(*mut T, c_int, u64) -> c_int| get(&mut value, attribute, addr),
        )
    };
    (result == Some(0)).then_some(value)
}
