//! What a GPU is: asked of the driver once, when the process first obtains memory there.

use std::ffi::{CStr, c_char, c_int, c_void};

use memtrace_trace::definition::Definition;

use super::call::driver_function;
use crate::guard::Guard;
use crate::real::Original;

/// Sends the device's definition. `obtained` bytes of what is in use were obtained by the call that is being recorded.
#[cold]
pub(crate) fn describe(guard: &mut Guard, ordinal: i16, obtained: u64) {
    static GET: Original = Original::new();
    static NAME: Original = Original::new();
    static TOTAL: Original = Original::new();
    static BUS: Original = Original::new();
    static INFO: Original = Original::new();
    let mut device: c_int = 0;
    let mut name = [0 as c_char; 256];
    let mut bus = [0 as c_char; 32];
    let (mut total, mut free, mut all) = (0usize, 0usize, 0usize);
    // SAFETY: the functions' signatures are cuda.h's; the buffers are as long as is said. None of them changes anything:
    // the context exists, since memory was just obtained in it.
    unsafe {
        call(&GET, c"cuDeviceGet", |f: unsafe extern "C" fn(*mut c_int, c_int) -> c_int| {
            f(&mut device, ordinal.into())
        });
        call(&NAME, c"cuDeviceGetName", |f: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int| {
            f(name.as_mut_ptr(), name.len() as c_int - 1, device)
        });
        call(&TOTAL, c"cuDeviceTotalMem_v2", |f: unsafe extern "C" fn(*mut usize, c_int) -> c_int| {
            f(&mut total, device)
        });
        call(&BUS, c"cuDeviceGetPCIBusId", |f: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int| {
            f(bus.as_mut_ptr(), bus.len() as c_int - 1, device)
        });
        call(&INFO, c"cuMemGetInfo_v2", |f: unsafe extern "C" fn(*mut usize, *mut usize) -> c_int| {
            f(&mut free, &mut all)
        });
    }
    // SAFETY: both buffers are zeroed and were written short of their last byte.
    let (name, bus) = unsafe { (CStr::from_ptr(name.as_ptr()), CStr::from_ptr(bus.as_ptr())) };
    guard.define(&Definition::Device {
        ordinal: u32::from(ordinal.unsigned_abs()),
        name: &name.to_string_lossy(),
        total: total as u64,
        used_before: (all.saturating_sub(free) as u64).saturating_sub(obtained),
        pci: &bus.to_string_lossy(),
    });
}

/// Calls a driver function, if the driver has it.
///
/// # Safety
/// `F` must be the type of the function of that name.
unsafe fn call<F: Copy>(cache: &Original, name: &CStr, make: impl FnOnce(F) -> c_int) {
    let function: *mut c_void = driver_function(cache, name);
    if !function.is_null() && size_of::<F>() == size_of::<*mut c_void>() {
        // SAFETY: the caller's promise; a function pointer is one word.
        make(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&function) });
    }
}
