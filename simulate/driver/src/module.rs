//! Modules, functions and launches. All are accepted, and no kernel runs.

use crate::state::{code, current_device, machine, now_ns};
use simcuda::abi::DriverLaunchConfig;
use simcuda::handle::Kind;
use simcuda::library_memory::image_bytes;
use simcuda::out::Out;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// The size in bytes of each `__device__` variable in a loaded module.
const GLOBAL_BYTES: u64 = 1 << 20;

/// Loads an image and gives out its handle. `loads_now` if its kernels are loaded onto the current device with eager
/// loading.
///
/// # Safety
/// See [`image_bytes`].
unsafe fn load(module: Out<u64>, image: *const c_void, loads_now: bool) -> c_int {
    // SAFETY: the caller guarantees it.
    let bytes = unsafe { image_bytes(image.cast()) };
    let device = current_device();
    let machine = &mut *machine();
    let handle = machine.handles.deal(Kind::Module);
    machine.loading.register(&machine.config, handle, bytes);
    module.put(handle);
    if loads_now && machine.config.eager_loading { code(machine.load_module(device, handle)) } else { 0 }
}

/// Gives out a function of a module, which loads the kernels of the module onto the current device.
fn use_module(function: Out<u64>, module: u64) -> c_int {
    let device = current_device();
    function.put(module);
    code(machine().load_module(device, module))
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoad(module: Out<u64>, _path: *const c_char) -> c_int {
    // SAFETY: null is allowed.
    unsafe { load(module, std::ptr::null(), true) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: Out<u64>, image: *const c_void) -> c_int {
    // SAFETY: by CUDA's contract it is an image.
    unsafe { load(module, image, true) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadDataEx(
    module: Out<u64>,
    image: *const c_void,
    _count: c_uint,
    _options: *const c_void,
    _values: *const c_void,
) -> c_int {
    // SAFETY: by CUDA's contract it is an image.
    unsafe { load(module, image, true) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLibraryLoadData(library: Out<u64>, code: *const c_void) -> c_int {
    // SAFETY: by CUDA's contract it is an image.
    unsafe { load(library, code, false) }
}

#[unsafe(no_mangle)]
extern "C" fn cuLibraryUnload(library: u64) -> c_int {
    unload(library)
}

fn unload(module: u64) -> c_int {
    let machine = &mut *machine();
    machine.loading.unload_module(&mut machine.devices, module);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuLibraryGetKernel(kernel: Out<u64>, library: u64, _name: *const c_char) -> c_int {
    kernel.put(library);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuKernelGetFunction(function: Out<u64>, kernel: u64) -> c_int {
    use_module(function, kernel)
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: u64) -> c_int {
    unload(module)
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetFunction(function: Out<u64>, module: u64, _name: *const c_char) -> c_int {
    use_module(function, module)
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
    // 1: eager, 2: lazy.
    mode.put(if machine().config.eager_loading { 1 } else { 2 });
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
