//! The state that the runtime adds to the driver: a last error for each thread, a default context, and its own ledger
//! lines.

use crate::driver::{Driver, driver};
use crate::objects;
use simcuda::error::Error;
use simcuda::ledger::{Call, Layer};
use simcuda::out::Out;
use std::cell::Cell;
use std::ffi::c_int;

thread_local! {
    static LAST: Cell<c_int> = const { Cell::new(0) };
}

/// Stores an error as the thread's last error and returns it. "Not ready" is not stored.
pub(crate) fn ret(code: c_int) -> c_int {
    if code != 0 && code != Error::NotReady.code() {
        LAST.set(code);
    }
    code
}

/// The thread's last error. `clear` resets it.
pub(crate) fn last(clear: bool) -> c_int {
    if clear { LAST.replace(0) } else { LAST.get() }
}

/// The driver, with a context current on this thread. Without one, device 0's primary context becomes current.
pub(crate) fn ready() -> Result<&'static Driver, c_int> {
    let d = driver();
    let mut context = 0;
    (d.ctx_get_current)(Out::from(&mut context));
    if context == 0 {
        make_current(d, 0)?;
    }
    Ok(d)
}

/// Makes a device's primary context current on this thread.
pub(crate) fn make_current(d: &Driver, device: c_int) -> Result<(), c_int> {
    let mut context = 0;
    match (d.primary_ctx_retain)(Out::from(&mut context), device) {
        0 => match (d.ctx_set_current)(context) {
            0 => match objects::load_registered(d) {
                0 => Ok(()),
                code => Err(code),
            },
            code => Err(code),
        },
        code => Err(code),
    }
}

/// The thread's current device. 0 when no context is current.
pub(crate) fn current_device() -> c_int {
    let mut device = 0;
    match (driver().ctx_get_device)(Out::from(&mut device)) {
        0 => device,
        _ => 0,
    }
}

/// Calls the driver with a context current and stores an error.
pub(crate) fn call(work: impl FnOnce(&Driver) -> c_int) -> c_int {
    ret(match ready() {
        Ok(d) => work(d),
        Err(code) => code,
    })
}

/// Calls the driver without making a context, and stores an error. On an H200, `cudaEventQuery`, `cudaEventSynchronize`
/// and `cudaEventElapsedTime` made none on device 0 in a thread without one; `cudaEventDestroy`, `cudaEventRecord` and
/// functions of streams did. The thread with which PyTorch 2.6 watches NCCL queries events of other devices.
pub(crate) fn call_without_context(work: impl FnOnce(&Driver) -> c_int) -> c_int {
    ret(work(driver()))
}

/// Marks the thread's driver calls as nested in a runtime function, until it is dropped.
struct Nested<'a>(&'a Driver);

impl<'a> Nested<'a> {
    fn enter(driver: &'a Driver) -> Self {
        (driver.bridge.nest)(true);
        Nested(driver)
    }
}

impl Drop for Nested<'_> {
    fn drop(&mut self) {
        (self.0.bridge.nest)(false);
    }
}

fn record(d: &Driver, number: u64, call: &Call, code: c_int) {
    let fields = call.fields(Layer::Runtime, false, code);
    // SAFETY: the pointer and the length describe `fields`, which is UTF-8 and outlives the call.
    unsafe { (d.bridge.append)(number, fields.as_ptr(), fields.len()) };
}

/// Serves an allocation: fails it on demand or does the work, then writes the ledger line.
///
/// The call takes its number after the nested driver call, because only then it owns the address.
pub(crate) fn take(mut call: Call, work: impl FnOnce(&Driver, &mut Call) -> c_int) -> c_int {
    let d = match ready() {
        Ok(d) => d,
        Err(code) => return ret(code),
    };
    call.device = Some(current_device() as usize);
    // SAFETY: the pointer and the length describe a static UTF-8 string.
    let struck = unsafe { (d.bridge.strikes)(call.api.as_ptr(), call.api.len()) };
    let code = if struck {
        Error::OutOfMemory.code()
    } else {
        let _nested = Nested::enter(d);
        work(d, &mut call)
    };
    if (d.bridge.ledger_on)() {
        record(d, (d.bridge.number)(), &call, code);
    }
    ret(code)
}

/// Serves a free. The call takes its number before the nested driver call, because afterwards another thread may get
/// the same address.
pub(crate) fn give(mut call: Call, work: impl FnOnce(&Driver) -> c_int) -> c_int {
    let d = match ready() {
        Ok(d) => d,
        Err(code) => return ret(code),
    };
    let number = (d.bridge.ledger_on)().then(|| {
        let size = call.addr.map_or(0, |addr| (d.bridge.size_at)(addr));
        call.size = Some(size).filter(|&size| size > 0);
        call.device = Some(current_device() as usize);
        (d.bridge.number)()
    });
    let code = {
        let _nested = Nested::enter(d);
        work(d)
    };
    if let Some(number) = number {
        record(d, number, &call, code);
    }
    ret(code)
}
