//! Tools that trace a program's calls, such as Nsight Systems: `cuInit` loads the library that `CUDA_INJECTION64_PATH`
//! names and calls its `InitializeInjection`. There it subscribes to the driver's calls through CUPTI.
//!
//! The calls that the ledger records are reported, before and after, on the calling thread and without the machine's
//! lock: a callback may call the driver. As with CUPTI, there is at most one subscriber.

use simcuda::cupti::{CallbackData, CallbackFunction, DOMAIN_DRIVER_API, SITE_ENTER, SITE_EXIT};
use std::ffi::{CString, c_int, c_void};
use std::mem::transmute;
use std::os::unix::ffi::OsStringExt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

const VARIABLE: &str = "CUDA_INJECTION64_PATH";

static IS_LOADED: AtomicBool = AtomicBool::new(false);
static SUBSCRIBER: Mutex<Option<Subscriber>> = Mutex::new(None);
static CORRELATION: AtomicU32 = AtomicU32::new(1);

#[derive(Clone, Copy)]
struct Subscriber {
    callback: CallbackFunction,
    /// The address that the callback gets.
    user_data: usize,
    is_enabled: bool,
}

/// Loads the injected library once. One that cannot be loaded is ignored.
pub(crate) fn load() {
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else { return };
    let Ok(path) = CString::new(path.into_vec()) else { return };
    // The library may call `cuInit` itself.
    if IS_LOADED.swap(true, Ordering::SeqCst) {
        return;
    }
    // SAFETY: both names are NUL-terminated strings, and the results are checked for null. By CUDA's contract the
    // library may be loaded at any time, and its function has this type.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        if library.is_null() {
            return;
        }
        let found = libc::dlsym(library, c"InitializeInjection".as_ptr());
        if !found.is_null() {
            transmute::<*mut c_void, extern "C" fn() -> c_int>(found)();
        }
    }
}

fn subscriber() -> Option<Subscriber> {
    *SUBSCRIBER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds the subscriber, or removes it if there is no callback. Returns false if there is one already.
pub(crate) extern "C" fn subscribe(callback: Option<CallbackFunction>, user_data: *mut c_void) -> bool {
    let mut subscriber = SUBSCRIBER.lock().unwrap_or_else(PoisonError::into_inner);
    if callback.is_some() && subscriber.is_some() {
        return false;
    }
    *subscriber =
        callback.map(|callback| Subscriber { callback, user_data: user_data.expose_provenance(), is_enabled: false });
    true
}

/// Switches the reports of driver calls on or off.
pub(crate) extern "C" fn enable(on: bool) {
    if let Some(subscriber) = &mut *SUBSCRIBER.lock().unwrap_or_else(PoisonError::into_inner) {
        subscriber.is_enabled = on;
    }
}

/// Serves a call of the driver, and reports it to the subscriber.
pub(crate) fn reported(api: &str, serve: impl FnOnce() -> c_int) -> c_int {
    let Some(subscriber) = subscriber().filter(|subscriber| subscriber.is_enabled) else { return serve() };
    let Ok(name) = CString::new(api) else { return serve() };
    let mut correlation_data = 0;
    let mut data = CallbackData {
        site: SITE_ENTER,
        function_name: name.as_ptr(),
        function_params: ptr::null(),
        function_return_value: ptr::null_mut(),
        symbol_name: ptr::null(),
        context: ptr::null_mut(),
        context_uid: 0,
        correlation_data: &raw mut correlation_data,
        correlation_id: CORRELATION.fetch_add(1, Ordering::Relaxed),
    };
    let report = |data: &CallbackData| {
        let user_data = ptr::with_exposed_provenance_mut(subscriber.user_data);
        // SAFETY: the subscriber passed this function and this pointer together, and keeps both until it unsubscribes.
        // The data is valid during the call.
        unsafe { (subscriber.callback)(user_data, DOMAIN_DRIVER_API, 0, data) };
    };
    report(&data);
    let mut result = serve();
    (data.site, data.function_return_value) = (SITE_EXIT, (&raw mut result).cast());
    report(&data);
    result
}
