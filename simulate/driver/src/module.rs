//! Modules, functions and launches. All are accepted, and no kernel runs.

use crate::state::{code, current_device, machine, now_ns};
use simcuda::abi::DriverLaunchConfig;
use simcuda::handle::Kind;
use simcuda::out::Out;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// The size in bytes of each `__device__` variable in a loaded module.
const GLOBAL_BYTES: u64 = 1 << 20;

fn load(module: Out<u64>) -> c_int {
    let handle = machine().handles.deal(Kind::Module);
    module.put(handle);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoad(module: Out<u64>, _path: *const c_char) -> c_int {
    load(module)
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadData(module: Out<u64>, _image: *const c_void) -> c_int {
    load(module)
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadDataEx(
    module: Out<u64>,
    _image: *const c_void,
    _count: c_uint,
    _options: *const c_void,
    _values: *const c_void,
) -> c_int {
    load(module)
}

#[unsafe(no_mangle)]
extern "C" fn cuLibraryLoadData(library: Out<u64>, _code: *const c_void) -> c_int {
    load(library)
}

#[unsafe(no_mangle)]
extern "C" fn cuLibraryUnload(_library: u64) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuLibraryGetKernel(kernel: Out<u64>, library: u64, _name: *const c_char) -> c_int {
    kernel.put(library);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuKernelGetFunction(function: Out<u64>, kernel: u64) -> c_int {
    function.put(kernel);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(_module: u64) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetFunction(function: Out<u64>, module: u64, _name: *const c_char) -> c_int {
    function.put(module);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetGlobal_v2(address: Out<u64>, size: Out<usize>, module: u64, _name: *const c_char) -> c_int {
    let storage = machine().symbol(module, GLOBAL_BYTES, current_device());
    code(storage.map(|base| {
        address.put(base);
        size.put(GLOBAL_BYTES as usize);
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetLoadingMode(mode: Out<c_int>) -> c_int {
    mode.put(2);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_int, _function: u64) -> c_int {
    // 0: the maximum number of threads in a block. 4: the number of registers of a thread.
    let number = match attribute {
        0 => 1024,
        4 => 32,
        _ => 0,
    };
    value.put(number);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(_function: u64, _attribute: c_int, _value: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetCacheConfig(_function: u64, _config: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    count: Out<c_int>,
    _function: u64,
    _block: c_int,
    _shared: usize,
) -> c_int {
    count.put(2);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuOccupancyMaxActiveClusters(
    count: Out<c_int>,
    _function: u64,
    _config: *const DriverLaunchConfig,
) -> c_int {
    count.put(8);
    0
}

/// Adds one launch to a stream.
pub(crate) fn launch(stream: u64) -> c_int {
    code(machine().launch(stream, current_device(), now_ns()).map(drop))
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
extern "C" fn cuLaunchKernel(
    _function: u64,
    _grid_x: c_uint,
    _grid_y: c_uint,
    _grid_z: c_uint,
    _block_x: c_uint,
    _block_y: c_uint,
    _block_z: c_uint,
    _shared: c_uint,
    stream: u64,
    _parameters: *const c_void,
    _extra: *const c_void,
) -> c_int {
    launch(stream)
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
extern "C" fn cuLaunchCooperativeKernel(
    _function: u64,
    _grid_x: c_uint,
    _grid_y: c_uint,
    _grid_z: c_uint,
    _block_x: c_uint,
    _block_y: c_uint,
    _block_z: c_uint,
    _shared: c_uint,
    stream: u64,
    _parameters: *const c_void,
) -> c_int {
    launch(stream)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernelEx(
    config: *const DriverLaunchConfig,
    _function: u64,
    _parameters: *const c_void,
    _extra: *const c_void,
) -> c_int {
    // SAFETY: by CUDA's contract the caller passes null or a pointer to a structure of that type.
    launch(unsafe { config.as_ref() }.map_or(0, |c| c.stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuTensorMapEncodeTiled(_map: *mut c_void) -> c_int {
    0
}
