//! CUDA IPC.

use crate::state::{call, give, put, take};
use simcuda::abi::IpcHandle;
use simcuda::error::Error;
use simcuda::ledger::Call;
use std::ffi::{c_int, c_uint};

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaIpcGetMemHandle(out: *mut IpcHandle, address: u64) -> c_int {
    let told = Call { api: "cudaIpcGetMemHandle", addr: Some(address), ..Call::default() };
    // SAFETY: see the crate's contract.
    give(told, |d| unsafe { (d.ipc_get_mem_handle)(out, address) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaIpcOpenMemHandle(out: *mut u64, handle: IpcHandle, flags: c_uint) -> c_int {
    let told = Call { api: "cudaIpcOpenMemHandle", addr: Some(0), flags: Some(flags.into()), ..Call::default() };
    take(told, |d, told| {
        if out.is_null() {
            return Error::InvalidValue.code();
        }
        let mut base = 0;
        // SAFETY: the out-pointer is ours.
        let code = unsafe { (d.ipc_open_mem_handle)(&mut base, handle, flags) };
        if code == 0 {
            told.addr = Some(base);
            told.size = Some((d.bridge.size_at)(base));
            // SAFETY: not null; see the crate's contract.
            unsafe { put(out, base) };
        }
        code
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaIpcCloseMemHandle(base: u64) -> c_int {
    let told = Call { api: "cudaIpcCloseMemHandle", addr: Some(base), ..Call::default() };
    // SAFETY: the driver checks the address.
    give(told, |d| unsafe { (d.ipc_close_mem_handle)(base) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaIpcGetEventHandle(out: *mut IpcHandle, event: u64) -> c_int {
    // SAFETY: see the crate's contract.
    call(|d| unsafe { (d.ipc_get_event_handle)(out, event) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaIpcOpenEventHandle(out: *mut u64, handle: IpcHandle) -> c_int {
    // SAFETY: see the crate's contract.
    call(|d| unsafe { (d.ipc_open_event_handle)(out, handle) })
}
