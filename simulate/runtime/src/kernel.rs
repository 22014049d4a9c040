//! The functions that nvcc's code calls: registration, launches, symbols. Kernels are counted and never run.

use crate::driver::driver;
use crate::objects;
use crate::state::call;
use simcuda::abi::{Dim3, FuncAttributes, RuntimeLaunchConfig};
use simcuda::out::Out;
use simcuda::stub::Call;
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// The size in bytes of each `__device__` variable. Its real size is not known here.
const SYMBOL_BYTES: u64 = 1 << 20;

/// The `<<<grid, block, shared, stream>>>` of a launch whose arguments are being evaluated.
#[derive(Clone, Copy, Default)]
struct Configuration {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: u64,
}

/// The maximum nesting of configurations: the arguments of a launch may launch kernels.
const DEEPEST: usize = 8;

thread_local! {
    static CONFIGURATIONS: Cell<(usize, [Configuration; DEEPEST])> = const {
        const NONE: Dim3 = Dim3 { xyz: [0; 3] };
        Cell::new((0, [Configuration { grid: NONE, block: NONE, shared: 0, stream: 0 }; DEEPEST]))
    };
}

fn launch(function: *const c_void, stream: u64) -> c_int {
    call(|d| match objects::load_of(d, function) {
        0 => (d.bridge.launch)(stream),
        code => code,
    })
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinary(image: *const c_void) -> *const c_void {
    static HANDLE: u64 = 0;
    objects::register(image);
    (&raw const HANDLE).cast()
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinaryEnd(_handle: *const c_void) {}

#[unsafe(no_mangle)]
extern "C" fn __cudaUnregisterFatBinary(_handle: *const c_void) {}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFunction() {}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterVar() {}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterManagedVar() {}

#[unsafe(no_mangle)]
extern "C" fn __cudaInitModule(_handle: *const c_void) -> c_char {
    1
}

#[unsafe(no_mangle)]
extern "C" fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared: usize, stream: u64) -> c_uint {
    let (depth, mut stack) = CONFIGURATIONS.get();
    if let Some(slot) = stack.get_mut(depth) {
        *slot = Configuration { grid, block, shared, stream };
    }
    CONFIGURATIONS.set((depth + 1, stack));
    0
}

#[unsafe(no_mangle)]
extern "C" fn __cudaPopCallConfiguration(
    grid: Out<Dim3>,
    block: Out<Dim3>,
    shared: Out<usize>,
    stream: Out<u64>,
) -> c_int {
    let (depth, stack) = CONFIGURATIONS.get();
    let depth = depth.saturating_sub(1);
    CONFIGURATIONS.set((depth, stack));
    let top = stack.get(depth).copied().unwrap_or_default();
    grid.put(top.grid);
    block.put(top.block);
    shared.put(top.shared);
    stream.put(top.stream);
    0
}

#[unsafe(no_mangle)]
extern "C" fn __cudaGetKernel(kernel: Out<*const c_void>, function: *const c_void) -> c_int {
    kernel.put(function);
    0
}

#[unsafe(no_mangle)]
extern "C" fn __cudaLaunchKernel(
    kernel: *const c_void,
    _grid: Dim3,
    _block: Dim3,
    _arguments: *const c_void,
    _shared: usize,
    stream: u64,
) -> c_int {
    launch(kernel, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cudaLaunchKernel(
    function: *const c_void,
    _grid: Dim3,
    _block: Dim3,
    _arguments: *const c_void,
    _shared: usize,
    stream: u64,
) -> c_int {
    launch(function, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cudaLaunchCooperativeKernel(
    function: *const c_void,
    _grid: Dim3,
    _block: Dim3,
    _arguments: *const c_void,
    _shared: usize,
    stream: u64,
) -> c_int {
    launch(function, stream)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaLaunchKernelExC(
    config: *const RuntimeLaunchConfig,
    function: *const c_void,
    _arguments: *const c_void,
) -> c_int {
    // SAFETY: by CUDA's contract the caller passes null or a pointer to a structure of that type.
    launch(function, unsafe { config.as_ref() }.map_or(0, |c| c.stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaFuncGetAttributes(out: Out<FuncAttributes>, _function: *const c_void) -> c_int {
    let attributes = FuncAttributes {
        max_threads: 1024,
        registers: 32,
        ptx_version: 90,
        binary_version: 90,
        max_dynamic_shared: 49152,
        ..FuncAttributes::default()
    };
    out.put(attributes);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaFuncSetAttribute(_function: *const c_void, _attribute: c_int, _value: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaFuncSetCacheConfig(_function: *const c_void, _config: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    count: Out<c_int>,
    _function: *const c_void,
    _block: c_int,
    _shared: usize,
) -> c_int {
    count.put(2);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    count: Out<c_int>,
    _function: *const c_void,
    _block: c_int,
    _shared: usize,
    _flags: c_uint,
) -> c_int {
    count.put(2);
    0
}

fn symbol(symbol: u64) -> u64 {
    (driver().bridge.symbol)(symbol, SYMBOL_BYTES)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetSymbolAddress(out: Out<u64>, name: u64) -> c_int {
    call(|_| {
        out.put(symbol(name));
        0
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpyToSymbol(name: u64, from: u64, size: usize, offset: usize, _kind: c_int) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    call(|d| unsafe { (d.memcpy)(symbol(name) + offset as u64, from, size) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpyToSymbolAsync(
    name: u64,
    from: u64,
    size: usize,
    offset: usize,
    _kind: c_int,
    stream: u64,
) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    call(|d| unsafe { (d.memcpy_async)(symbol(name) + offset as u64, from, size, stream) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpyFromSymbol(to: u64, name: u64, size: usize, offset: usize, _kind: c_int) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    call(|d| unsafe { (d.memcpy)(to, symbol(name) + offset as u64, size) })
}

simcuda::stub_entry!(stub_called_in_runtime);

/// Counts a call of a generated stub. No stub of the runtime creates an object.
fn stub_called_in_runtime(call: Call) -> c_int {
    // SAFETY: the name is a NUL-terminated string that lives forever.
    unsafe { (driver().bridge.stub)(call.name().as_ptr()) };
    call.write_outputs(std::ptr::null_mut);
    0
}
