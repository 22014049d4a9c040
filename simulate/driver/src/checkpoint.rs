//! The checkpoint functions, with which one process suspends another. They work where processes share devices
//! (`SIMCUDA_SHARED`).

use crate::state::{code, shared_devices};
use simcuda::checkpoint::Remote;
use simcuda::error::{Error, Result};
use simcuda::out::Out;
use std::ffi::{c_int, c_uint, c_void};
use std::time::Duration;

/// Does `work` with a process. `capacity` is that of each device in bytes.
fn with_process(pid: c_int, work: impl FnOnce(&mut Remote, u64) -> Result<()>) -> c_int {
    let open = || {
        let (folder, capacity) = shared_devices().ok_or(Error::NotSupported)?;
        let pid = u32::try_from(pid).map_err(|_| Error::InvalidValue)?;
        Ok((Remote::open(&folder, pid)?, capacity))
    };
    code(open().and_then(|(mut remote, capacity)| work(&mut remote, capacity)))
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessGetState(pid: c_int, state: Out<c_uint>) -> c_int {
    with_process(pid, |process, _| {
        state.put(process.state() as c_uint);
        Ok(())
    })
}

/// The first word of the arguments is the timeout in milliseconds; 0 is none.
#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessLock(pid: c_int, arguments: Out<c_uint>) -> c_int {
    let timeout = Duration::from_millis(arguments.get().unwrap_or(0).into());
    with_process(pid, |process, _| process.lock(timeout))
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessCheckpoint(pid: c_int, _arguments: Out<c_void>) -> c_int {
    with_process(pid, |process, _| process.checkpoint())
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessRestore(pid: c_int, _arguments: Out<c_void>) -> c_int {
    with_process(pid, |process, capacity| process.restore(capacity))
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessUnlock(pid: c_int, _arguments: Out<c_void>) -> c_int {
    with_process(pid, |process, _| process.unlock())
}
