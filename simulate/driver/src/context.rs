//! Contexts: the primary context of each device, the contexts that programs create, and each thread's stack.

use crate::device::ordinal_of;
use crate::state::{
    Current, code, current, current_device, machine, push_current, required_device, set_current, synchronize,
};
use simcuda::context::primary;
use simcuda::error::{Error, Result};
use simcuda::out::Out;
use std::ffi::{c_int, c_uint, c_void};

/// `CU_LIMIT_STACK_SIZE`
const STACK_SIZE: c_int = 0;

fn entry(context: u64) -> Result<Current> {
    let m = machine();
    let device = m.contexts.device(context, m.devices.len())?;
    Ok(Current { context, device })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: c_int) -> c_int {
    code(ordinal_of(device).and_then(|d| {
        machine().activate(d)?;
        context.put(primary(d));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxReset_v2(_device: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxSetFlags_v2(_device: c_int, _flags: c_uint) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) -> c_int {
    code(ordinal_of(device).map(|d| {
        let is_active = machine().devices[d].primary_active;
        flags.put(0);
        active.put(c_int::from(is_active));
    }))
}

fn create(context: Out<u64>, device: c_int) -> c_int {
    code(ordinal_of(device).and_then(|d| {
        let handle = machine().create_context(d)?;
        push_current(Current { context: handle, device: d })?;
        context.put(handle);
        Ok(())
    }))
}

/// The interface of before CUDA 3.2, which programs get that look the name up without a version.
#[unsafe(no_mangle)]
extern "C" fn cuCtxCreate(context: Out<u64>, _flags: c_uint, device: c_int) -> c_int {
    create(context, device)
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxCreate_v2(context: Out<u64>, _flags: c_uint, device: c_int) -> c_int {
    create(context, device)
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxCreate_v3(
    context: Out<u64>,
    _affinity: *const c_void,
    _count: c_int,
    _flags: c_uint,
    device: c_int,
) -> c_int {
    create(context, device)
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxCreate_v4(context: Out<u64>, _params: *const c_void, _flags: c_uint, device: c_int) -> c_int {
    create(context, device)
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxDestroy_v2(context: u64) -> c_int {
    if current().is_some_and(|c| c.context == context) {
        set_current(None);
    }
    code(machine().destroy_context(context))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: Out<u64>) -> c_int {
    context.put(current().map_or(0, |c| c.context));
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: u64) -> c_int {
    if context == 0 {
        set_current(None);
        return 0;
    }
    code(entry(context).map(|top| set_current(Some(top))))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: u64) -> c_int {
    code(entry(context).and_then(push_current))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPopCurrent_v2(context: Out<u64>) -> c_int {
    let Some(top) = current() else { return Error::InvalidContext.code() };
    set_current(None);
    context.put(top.context);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetDevice(device: Out<c_int>) -> c_int {
    code(required_device().map(|d| device.put(d as c_int)))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetFlags(flags: Out<c_uint>) -> c_int {
    flags.put(0);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetApiVersion(_context: u64, version: Out<c_uint>) -> c_int {
    version.put(3020);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) -> c_int {
    least.put(0);
    greatest.put(-5);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxEnablePeerAccess(_peer: u64, _flags: c_uint) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxDisablePeerAccess(_peer: u64) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetLimit(value: Out<usize>, limit: c_int) -> c_int {
    let device = current_device();
    value.put(if limit == STACK_SIZE { machine().loading.stack_bytes(device) as usize } else { 1 << 20 });
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetLimit(limit: c_int, value: usize) -> c_int {
    let device = current_device();
    if limit == STACK_SIZE {
        machine().loading.set_stack_bytes(device, value as u64);
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    let then = machine().device(current_device()).map(|d| d.busy_until);
    code(then.map(synchronize))
}
