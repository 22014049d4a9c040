//! The objects whose kernels the runtime launches: their kernels take device memory at the first launch, or with the
//! context if modules are loaded eagerly.

use crate::driver::Driver;
use simcuda::library_memory::Kernels;
use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, PoisonError};

/// The kernels of the objects that registered any, as bits, where modules are loaded eagerly.
static REGISTERED: AtomicU32 = AtomicU32::new(0);

/// The kernels of the object that contains an address.
fn kernels_at(address: *const c_void) -> Kernels {
    // SAFETY: `dladdr` accepts any address, and `found` is valid for writes. A name that it gives is a NUL-terminated
    // string that lives as long as the object, which is being called.
    let path = unsafe {
        let mut found: libc::Dl_info = std::mem::zeroed();
        let is_known = libc::dladdr(address, &mut found) != 0 && !found.dli_fname.is_null();
        if is_known { CStr::from_ptr(found.dli_fname).to_string_lossy() } else { "".into() }
    };
    Kernels::of_object(&path)
}

/// Notes that the object that contains an address has kernels.
pub(crate) fn register(address: *const c_void) {
    if std::env::var_os("CUDA_MODULE_LOADING").is_some_and(|mode| mode == "EAGER") {
        REGISTERED.fetch_or(1 << kernels_at(address) as u32, Relaxed);
    }
}

/// Loads the kernels of all objects that registered any onto the current device, where modules are loaded eagerly.
pub(crate) fn load_registered(d: &Driver) -> c_int {
    const TORCH: u32 = 1 << Kernels::Torch as u32;
    let registered = REGISTERED.load(Relaxed);
    // The figure of PyTorch includes the small objects that come with it.
    let registered = if registered & TORCH != 0 { TORCH } else { registered };
    let loaded = (0..u32::BITS).filter(|bit| registered >> bit & 1 != 0).map(|kernels| (d.bridge.load)(kernels));
    loaded.into_iter().find(|code| *code != 0).unwrap_or(0)
}

/// Loads the kernels of the object of a function onto the current device.
pub(crate) fn load_of(d: &Driver, function: *const c_void) -> c_int {
    /// The kernels of the functions that were launched, by address.
    static KNOWN: LazyLock<Mutex<HashMap<usize, Kernels>>> = LazyLock::new(Mutex::default);
    if !(d.bridge.library_memory)() {
        return 0;
    }
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = *known.entry(function as usize).or_insert_with(|| kernels_at(function));
    drop(known);
    (d.bridge.load)(kernels as u32)
}
