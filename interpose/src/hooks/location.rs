//! Where memory is, as the driver tells: the calling thread's current device is where memory is obtained, but it may be given back
//! and mapped from anywhere.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

use super::call::ON_HOST;
use super::cuda::{AllocationProperties, place};
use super::device::ask;
use crate::real::Original;

/// The device of the calling thread's context; -1 when there is none.
pub(super) fn current_device() -> i16 {
    static GET_DEVICE: Original = Original::new();
    let mut device = -1;
    // SAFETY: `CUresult cuCtxGetDevice(CUdevice *)`.
    let result = unsafe {
        ask(&GET_DEVICE, c"cuCtxGetDevice", |get: unsafe extern "C" fn(*mut c_int) -> c_int| get(&mut device))
    };
    if result == Some(0) { i16::try_from(device).unwrap_or(-1) } else { -1 }
}

/// How many devices the process has; 0 where the driver does not say.
fn devices() -> c_int {
    static GET_COUNT: Original = Original::new();
    static DEVICES: AtomicI32 = AtomicI32::new(0);
    let mut count = DEVICES.load(Ordering::Relaxed);
    if count == 0 {
        // SAFETY: `CUresult cuDeviceGetCount(int *)`.
        unsafe {
            ask(&GET_COUNT, c"cuDeviceGetCount", |get: unsafe extern "C" fn(*mut c_int) -> c_int| get(&mut count));
        }
        DEVICES.store(count, Ordering::Relaxed);
    }
    count
}

/// Where the device memory at this address is, as [`super::call::Memory::place`] has it. Not asked for where there is one device
/// only.
pub(super) fn of_address(addr: u64) -> u64 {
    /// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
    const DEVICE_ORDINAL: c_int = 9;
    match devices() {
        count if count < 1 => 0,
        1 => 1,
        _ => pointer_attribute::<c_int>(DEVICE_ORDINAL, addr, -1)
            .and_then(|ordinal| u64::try_from(ordinal).ok())
            .map_or(0, |ordinal| ordinal + 1),
    }
}

/// Where physical memory is, by its handle.
pub(super) fn of_handle(handle: u64) -> u64 {
    static GET_PROPERTIES: Original = Original::new();
    let mut properties = AllocationProperties::default();
    // SAFETY: `CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *, CUmemGenericAllocationHandle)`; ours has the
    // size of that structure. A handle that is none is an error there.
    let result = unsafe {
        ask(
            &GET_PROPERTIES,
            c"cuMemGetAllocationPropertiesFromHandle",
            |get: unsafe extern "C" fn(*mut AllocationProperties, u64) -> c_int| get(&mut properties, handle),
        )
    };
    if result == Some(0) { place(&properties) } else { 0 }
}

/// The ordinal that a place stands for; `current` where the call says nothing about it.
pub(super) fn ordinal(place: u64, current: impl FnOnce() -> i16) -> i16 {
    match place {
        0 => current(),
        ON_HOST => -1,
        place => i16::try_from(place - 1).unwrap_or(-1),
    }
}

/// One attribute of an address, of type `T`, which must be the attribute's.
pub(super) fn pointer_attribute<T: Copy>(attribute: c_int, addr: u64, empty: T) -> Option<T> {
    static GET_ATTRIBUTE: Original = Original::new();
    let mut value = empty;
    // SAFETY: `CUresult cuPointerGetAttribute(void *, CUpointer_attribute, CUdeviceptr)`; the caller names the attribute's type.
    let result = unsafe {
        ask(&GET_ATTRIBUTE, c"cuPointerGetAttribute", |get: unsafe extern "C" fn(*mut T, c_int, u64) -> c_int| {
            get(&mut value, attribute, addr)
        })
    };
    (result == Some(0)).then_some(value)
}
