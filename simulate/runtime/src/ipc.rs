//! CUDA IPC.

use crate::state::{call, give, take};
use simcuda::abi::IpcHandle;
use simcuda::error::Error;
use simcuda::ledger::Call;
use simcuda::out::Out;
use std::ffi::{c_int, c_uint};

#[unsafe(no_mangle)]
extern "C" fn cudaIpcGetMemHandle(out: Out<IpcHandle>, address: u64) -> c_int {
    let call = Call { api: "cudaIpcGetMemHandle", addr: Some(address), ..Call::default() };
    give(call, |d| (d.ipc_get_mem_handle)(out, address))
}

#[unsafe(no_mangle)]
extern "C" fn cudaIpcOpenMemHandle(out: Out<u64>, handle: IpcHandle, flags: c_uint) -> c_int {
    let call = Call { api: "cudaIpcOpenMemHandle", addr: Some(0), flags: Some(flags.into()), ..Call::default() };
    take(call, |d, call| {
        if out.is_null() {
            return Error::InvalidValue.code();
        }
        let mut base = 0;
        let code = (d.ipc_open_mem_handle)(Out::from(&mut base), handle, flags);
        if code == 0 {
            call.addr = Some(base);
            call.size = Some((d.bridge.size_at)(base));
            out.put(base);
        }
        code
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaIpcCloseMemHandle(base: u64) -> c_int {
    let call = Call { api: "cudaIpcCloseMemHandle", addr: Some(base), ..Call::default() };
    give(call, |d| (d.ipc_close_mem_handle)(base))
}

#[unsafe(no_mangle)]
extern "C" fn cudaIpcGetEventHandle(out: Out<IpcHandle>, event: u64) -> c_int {
    call(|d| (d.ipc_get_event_handle)(out, event))
}

#[unsafe(no_mangle)]
extern "C" fn cudaIpcOpenEventHandle(out: Out<u64>, handle: IpcHandle) -> c_int {
    call(|d| (d.ipc_open_event_handle)(out, handle))
}
