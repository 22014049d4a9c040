//! CUDA IPC. Memory handles work between processes of one host. Opening an event's handle creates a new, finished
//! event.

use crate::memory::release;
use crate::state::{Purpose, code, current_device, machine, recorded, required_device};
use simcuda::abi::IpcHandle;
use simcuda::checkpoint::Obstacle;
use simcuda::error::Error;
use simcuda::ipc::MemHandle;
use simcuda::ledger::Call;
use simcuda::out::Out;
use std::ffi::{c_int, c_uint};

#[unsafe(no_mangle)]
extern "C" fn cuIpcGetMemHandle(out: Out<IpcHandle>, address: u64) -> c_int {
    let machine = machine();
    let shared = machine.share(address);
    if let (Ok(_), Some(gate)) = (&shared, &machine.gate) {
        gate.add(Obstacle::Ipc);
    }
    code(shared.map(|handle| out.put(IpcHandle { bytes: handle.encode() })))
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcOpenMemHandle_v2(out: Out<u64>, handle: IpcHandle, flags: c_uint) -> c_int {
    let call = Call {
        api: "cuIpcOpenMemHandle_v2",
        addr: Some(0),
        size: Some(0),
        device: Some(current_device()),
        flags: Some(flags.into()),
        ..Call::default()
    };
    recorded(Purpose::Take, call, |m, call| {
        if out.is_null() {
            return Err(Error::InvalidValue);
        }
        let handle = MemHandle::decode(&handle.bytes)?;
        let base = m.open_import(&handle, required_device()?)?;
        m.gate.iter().for_each(|gate| gate.add(Obstacle::Ipc));
        call.addr = Some(base);
        call.size = Some(handle.size);
        out.put(base);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(base: u64) -> c_int {
    release("cuIpcCloseMemHandle", base, None, |m| m.close_import(base).map(Some))
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcGetEventHandle(out: Out<IpcHandle>, _event: u64) -> c_int {
    out.put(IpcHandle { bytes: [0; 64] });
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcOpenEventHandle(out: Out<u64>, _handle: IpcHandle) -> c_int {
    let m = &mut *machine();
    let event = m.streams.create_event(&mut m.handles);
    out.put(event);
    0
}
