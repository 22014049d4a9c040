//! CUPTI: it never reports any activity. One subscriber can get the driver's calls, those of the ledger, as a domain.

use crate::support::{Handle, bridge};
use simcuda::cupti::{CallbackFunction, DOMAIN_DRIVER_API};
use simcuda::out::Out;
use std::ffi::{c_char, c_int, c_void};

const MAX_LIMIT_REACHED: c_int = 12;
const NOT_INITIALIZED: c_int = 15;
const MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED: c_int = 39;

#[unsafe(no_mangle)]
extern "C" fn cuptiSubscribe(
    subscriber: Out<Box<Handle>>,
    callback: Option<CallbackFunction>,
    user_data: *mut c_void,
) -> c_int {
    let Some(bridge) = bridge() else { return NOT_INITIALIZED };
    if !(bridge.subscribe)(callback, user_data) {
        return MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
    }
    subscriber.put(Box::default());
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuptiUnsubscribe(_subscriber: Option<Box<Handle>>) -> c_int {
    bridge().map_or(NOT_INITIALIZED, |bridge| {
        (bridge.subscribe)(None, std::ptr::null_mut());
        0
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuptiEnableDomain(enable: u32, _subscriber: *const c_void, domain: c_int) -> c_int {
    if domain == DOMAIN_DRIVER_API
        && let Some(bridge) = bridge()
    {
        (bridge.enable_callbacks)(enable != 0);
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuptiGetVersion(version: Out<u32>) -> c_int {
    version.put(130_000);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuptiActivityGetNextRecord(_buffer: *const c_void, _size: usize, record: Out<*mut c_void>) -> c_int {
    record.put(std::ptr::null_mut());
    MAX_LIMIT_REACHED
}

#[unsafe(no_mangle)]
extern "C" fn cuptiGetResultString(_status: c_int, text: Out<*const c_char>) -> c_int {
    text.put(c"simulated CUPTI status".as_ptr());
    0
}
