//! The bodies of the hooked CUDA functions: which argument is the address, which is the size.
//!
//! The signatures are those of cuda.h and cuda_runtime_api.h. In CUDA 12 and 13 both headers name the same machine
//! types.

#![allow(non_snake_case)]

use std::ffi::{c_char, c_void};

use memtrace_trace::api::Api;
use memtrace_trace::event::Action;
use memtrace_trace::hooked_functions;

use super::call::{Call, ERROR_UNKNOWN, driver_original};
use super::contexts;
use super::driver::driver_function;
use super::entry::entry;
use super::graphs;
use super::hook::Hook;
use super::ipc::{IpcHandle, hash_at};
use super::limited::{self, MemorySource};
use super::location;
use super::memory::{AllocationProperties, CallMemory, location_of};
use crate::linker::original::OriginalFunction;

/// `cudaExtent`, by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Extent {
    width: usize,
    height: usize,
    depth: usize,
}

/// `cudaPitchedPtr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct PitchedPtr {
    ptr: u64,
    pitch: usize,
    xsize: usize,
    ysize: usize,
}

/// `cudaChannelFormatDesc`: bits of each channel, then the kind.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ChannelFormat {
    bits: [i32; 4],
    kind: i32,
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ArrayDescriptor {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Array3dDescriptor {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

/// Reads a value that the program's pointer refers to. Zero for null.
fn read<T: Copy + Default>(pointer: *const T) -> T {
    if pointer.is_null() {
        return T::default();
    }
    // SAFETY: the original has just used the same pointer in the same way and reported success.
    unsafe { pointer.read_unaligned() }
}

/// Reads the address or the handle that the driver has written, because it is about to become invalid.
fn take(out: *mut u64) -> u64 {
    let taken = read(out);
    if !out.is_null() {
        // SAFETY: the original has just written the same pointer and reported success.
        unsafe { out.write_unaligned(0) };
    }
    taken
}

/// An argument of a call that failed. The memory of an out-pointer was not written and may not be mapped, so the
/// pointer becomes null.
trait Argument: Copy {
    fn after_failure(self) -> Self {
        self
    }
}

impl<T> Argument for *mut T {
    fn after_failure(self) -> Self {
        std::ptr::null_mut()
    }
}

impl<T> Argument for *const T {}
impl Argument for usize {}
impl Argument for u64 {}
impl Argument for u32 {}
impl Argument for i32 {}
impl Argument for Extent {}
impl Argument for IpcHandle {}

/// Bytes of rows that are `pitch` bytes apart. `pitch` is 0 if it is unknown.
fn pitched_bytes(pitch: usize, width: usize, height: usize, depth: usize) -> usize {
    pitch.max(width).saturating_mul(height).saturating_mul(depth)
}

fn element_count(width: usize, height: usize, depth: usize) -> u64 {
    (width.max(1) as u64).saturating_mul(height.max(1) as u64).saturating_mul(depth.max(1) as u64)
}

/// Bytes of one element of an array, from `CUarray_format` of cuda.h: 8-, 16- and 32-bit integers and floats. All other
/// formats are block-compressed or planar and count as one byte a channel.
fn format_bytes(format: u32) -> u64 {
    match format {
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => 1,
    }
}

fn array_2d_bytes(descriptor: *const ArrayDescriptor) -> u64 {
    if descriptor.is_null() {
        return 0;
    }
    // SAFETY: the original has just read the same pointer and reported success.
    let d = unsafe { descriptor.read_unaligned() };
    element_count(d.width, d.height, 1) * format_bytes(d.format) * u64::from(d.channels.max(1))
}

fn array_3d_bytes(descriptor: *const Array3dDescriptor) -> u64 {
    if descriptor.is_null() {
        return 0;
    }
    // SAFETY: the original has just read the same pointer and reported success.
    let d = unsafe { descriptor.read_unaligned() };
    element_count(d.width, d.height, d.depth) * format_bytes(d.format) * u64::from(d.channels.max(1))
}

fn channel_array_bytes(format: *const ChannelFormat, extent: Extent) -> u64 {
    if format.is_null() {
        return 0;
    }
    // SAFETY: the original has just read the same pointer and reported success.
    let f = unsafe { format.read_unaligned() };
    let bits: u64 = f.bits.iter().map(|b| (*b).max(0) as u64).sum();
    element_count(extent.width, extent.height, extent.depth) * bits.div_ceil(8)
}

/// Bytes of all levels of a mipmapped array whose first level has `base` bytes. Each level has a quarter of the
/// previous one's bytes, or an eighth in three dimensions.
fn mipmap_bytes(base: u64, levels: u32, three_dimensional: bool) -> u64 {
    let shift = if three_dimensional { 3 } else { 2 };
    (0..levels.min(32)).map(|level| (base >> (shift * level)).max(1)).sum()
}

/// The size of an imported allocation in bytes, as `cuMemGetAddressRange` returns it. 0 if that fails.
fn imported_size(addr: u64) -> u64 {
    static RANGE: OriginalFunction = OriginalFunction::new();
    let function = driver_function(&RANGE, c"cuMemGetAddressRange_v2");
    if function.is_null() {
        return 0;
    }
    let (mut base, mut size) = (0u64, 0usize);
    // SAFETY: cuda.h declares `CUresult cuMemGetAddressRange_v2(CUdeviceptr *, size_t *, CUdeviceptr)`. `base` and
    // `size` are writable.
    let result = unsafe {
        let range: unsafe extern "C" fn(*mut u64, *mut usize, u64) -> i32 = std::mem::transmute(function);
        range(&mut base, &mut size, addr)
    };
    if result == 0 { size as u64 } else { 0 }
}

/// For each hooked function a macro that puts its effect and its action before its declaration.
macro_rules! define_declarations {
    (
        $d:tt
        $($number:literal $symbol:ident $Source:ident $Memory:ident $Effect:ident $Action:ident
        $(as $name:ident $(since $version:literal)?)?;)*
    ) => {
        $(
            macro_rules! $symbol {
                ($d($d declaration:tt)*) => { hook! { $Effect $Action $d($d declaration)* } };
            }
        )*
    };
}

hooked_functions!(define_declarations $);

/// Declares the bodies: signature, recorded values, and for allocations within a limit how they are undone.
macro_rules! hooks {
    ($($name:ident($($arg:ident: $type:ty),*) { $($values:tt)* } $(, within { $($limit:tt)* })?)*) => {
        $($name! { $name($($arg: $type),*) { $($values)* } $(, within { $($limit)* })? })*
    };
}

/// One hook with its body.
macro_rules! hook {
    (
        $Effect:ident $Action:ident $name:ident($($arg:ident: $type:ty),*) { $($field:ident: $value:expr),* }
        $(, within { $source:expr, $bytes:expr, undo: $undo:expr })?
    ) => {
        #[doc = concat!("`", stringify!($name), "`.")]
        pub(super) mod $name {
            use super::*;

            /// The hook.
            pub(in crate::cuda) static HOOK: Hook =
                Hook::new(Api::$name, concat!(stringify!($name), "\0"), $name::own, $name);

            entry!($name => body);

            unsafe extern "C-unwind" fn body($($arg: $type),*) -> i32 {
                let call = Call::begin(&HOOK);
                let original = call.original();
                if original.is_null() {
                    return ERROR_UNKNOWN;
                }
                type Signature = unsafe extern "C-unwind" fn($($type),*) -> i32;
                // SAFETY: `original` is the function of this symbol, which has this signature in CUDA's headers.
                let original = unsafe { std::mem::transmute::<*mut c_void, Signature>(original) };
                // SAFETY: the program passes these arguments for this function.
                let original = || unsafe { original($($arg),*) };
                hook!(@begins $Effect $name $($source)?);
                $(let original = || limited::allocate(|| $source, || $bytes as u64, original, || $undo);)?
                hook!(@$Effect call $Action [$($arg),*] { $($field: $value),* } { original() })
            }
        }
    };
    // An allocation that no limit concerns. That of the runtime is inside one of the driver.
    (@begins Allocates $name:ident) => {
        if const { !Hook::is_of_runtime(Api::$name) } {
            limited::begin();
        }
    };
    (@begins Retains $name:ident) => {
        hook!(@begins Allocates $name);
    };
    (@begins $Effect:ident $name:ident $($source:expr)?) => {};
    (@Allocates $call:ident $action:ident [$($arg:ident),*] { $($field:ident: $value:expr),* } $original:block) => {{
        let (result, has_nested) = $call.run(|| $original);
        $call.record_allocation(Action::$action, result, has_nested, || {
            $(
                #[allow(unused_variables, reason = "not every argument is recorded")]
                let $arg = if result == 0 { $arg } else { $arg.after_failure() };
            )*
            #[allow(clippy::needless_update, reason = "not every call has a stream")]
            let memory = CallMemory { $($field: $value as u64,)* ..CallMemory::default() };
            // After a failure the address of a requested mapping or registration is not recorded either.
            if result == 0 { memory } else { CallMemory { addr: 0, ..memory } }
        });
        result
    }};
    (@Retains $($call:tt)*) => { hook!(@Allocates $($call)*) };
    (@Frees $call:ident $action:ident [$($arg:ident),*] { $($field:ident: $value:expr),* } $original:block) => {{
        #[allow(clippy::needless_update, reason = "not every call has a size or a stream")]
        let memory = CallMemory { $($field: $value as u64,)* ..CallMemory::default() };
        let seq = $call.record_release(Action::$action, memory);
        let (result, _) = $call.run(|| $original);
        if result != 0 {
            $call.retract(seq, result);
        }
        result
    }};
    (@CreatesContext $call:ident $action:ident [$($arg:ident),*] {
        $creates:ident: $is_new:expr, $context:ident: $out:expr, $ordinal:ident: $device:expr
    } $original:block) => {{
        let creation = $is_new.then(|| contexts::Creation::begin($call.api(), $device));
        let (result, _) = $call.run(|| $original);
        if let Some(creation) = creation.filter(|_| result == 0) {
            creation.end(read($out));
        }
        result
    }};
    (@LoadsCode $call:ident $action:ident [$($arg:ident),*] { } $original:block) => {{
        let (result, _) = $call.run(|| $original);
        $call.record_load(result);
        result
    }};
    (@Exports $($call:tt)*) => { hook!(@BeginsCapture $($call)*) };
    (@EndsCapture $($call:tt)*) => { hook!(@BeginsCapture $($call)*) };
    (@Uploads $($call:tt)*) => { hook!(@Instantiates $($call)*) };
    (@BeginsCapture $call:ident $action:ident [$($arg:ident),*] {
        $($field:ident: $value:expr),*
    } $original:block) => {{
        let (result, _) = $call.run(|| $original);
        hook!(@graph $call $action result [$($arg),*] { $($field: $value),* });
        result
    }};
    (@Instantiates $call:ident $action:ident [$($arg:ident),*] { $($field:ident: $value:expr),* } $original:block) => {{
        let before = graphs::free_bytes();
        let (result, _) = $call.run(|| $original);
        hook!(@graph $call $action result [$($arg),*] { size: graphs::bytes_taken(before), $($field: $value),* });
        result
    }};
    (@DestroysGraph $call:ident $action:ident [$($arg:ident),*] {
        $($field:ident: $value:expr),*
    } $original:block) => {{
        // Recorded before the call, after which another graph may have the same handle.
        hook!(@graph $call $action 0 [] { $($field: $value),* });
        $call.run(|| $original).0
    }};
    (@graph $call:ident $action:ident $result:tt [$($arg:ident),*] { $($field:ident: $value:expr),* }) => {
        $call.record_without_memory(Action::$action, $result, || {
            $(
                #[allow(unused_variables, reason = "not every argument is recorded")]
                let $arg = if $result == 0 { $arg } else { $arg.after_failure() };
            )*
            CallMemory { $($field: $value as u64,)* ..CallMemory::default() }
        })
    };
    (@Trims $call:ident $action:ident [$($arg:ident),*] { $field:ident: $pool:expr } $original:block) => {{
        let (result, _) = $call.run(|| $original);
        $call.record_pool_size($pool, 0);
        result
    }};
}

macro_rules! undoing {
    ($($(#[$doc:meta])* $name:ident => $function:ident($($arg:ident: $type:ty),*);)*) => {
        $(
            $(#[$doc])*
            fn $name($($arg: $type),*) {
                let function = driver_original(&$function::HOOK);
                if function.is_null() {
                    return;
                }
                // SAFETY: this is the signature of the function in cuda.h. The driver has just returned what is
                // released.
                unsafe {
                    let function: unsafe extern "C-unwind" fn($($type),*) -> i32 = std::mem::transmute(function);
                    function($($arg),*);
                }
            }
        )*
    };
}

undoing! {
    /// Undoes `cuMemAlloc`.
    free => cuMemFree_v2(addr: u64);
    /// Undoes `cuMemAllocAsync`.
    free_async => cuMemFreeAsync(addr: u64, stream: u64);
    /// Undoes `cuMemAllocAsync` of a thread with its own default stream.
    free_async_ptsz => cuMemFreeAsync_ptsz(addr: u64, stream: u64);
    /// Undoes `cuMemCreate`.
    release => cuMemRelease(handle: u64);
    /// Undoes `cuArrayCreate`.
    destroy_array => cuArrayDestroy(handle: u64);
    /// Undoes `cuMipmappedArrayCreate`.
    destroy_mipmapped_array => cuMipmappedArrayDestroy(handle: u64);
    /// Undoes `cuGraphInstantiate`.
    destroy_graph => cuGraphExecDestroy(executable: u64);
}

hooks! {
    cuMemAlloc_v2(out: *mut u64, size: usize) { addr: read(out), size: size }, within {
        MemorySource::Current, size, undo: free(take(out))
    }
    cuMemAllocPitch_v2(out: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) {
        addr: read(out), size: pitched_bytes(read(pitch), width, height, 1)
    }, within {
        MemorySource::Current, pitched_bytes(0, width, height, 1), undo: free(take(out))
    }
    cuMemAllocManaged(out: *mut u64, size: usize, flags: u32) { addr: read(out), size: size }
    cuMemAllocAsync(out: *mut u64, size: usize, stream: u64) { addr: read(out), size: size, stream: stream }, within {
        MemorySource::Pool { pool: 0, stream }, size, undo: free_async(take(out), stream)
    }
    cuMemAllocAsync_ptsz(out: *mut u64, size: usize, stream: u64)
        { addr: read(out), size: size, stream: stream }, within {
        MemorySource::Pool { pool: 0, stream }, size, undo: free_async_ptsz(take(out), stream)
    }
    cuMemAllocFromPoolAsync(out: *mut u64, size: usize, pool: *mut c_void, stream: u64) {
        addr: read(out), size: size, stream: stream
    }, within {
        MemorySource::Pool { pool: pool.addr() as u64, stream }, size, undo: free_async(take(out), stream)
    }
    cuMemAllocFromPoolAsync_ptsz(out: *mut u64, size: usize, pool: *mut c_void, stream: u64) {
        addr: read(out), size: size, stream: stream
    }, within {
        MemorySource::Pool { pool: pool.addr() as u64, stream }, size, undo: free_async_ptsz(take(out), stream)
    }
    cuMemFreeAsync(addr: u64, stream: u64) { addr: addr, stream: stream }
    cuMemFreeAsync_ptsz(addr: u64, stream: u64) { addr: addr, stream: stream }
    cuMemFree_v2(addr: u64) { addr: addr }
    cuMemCreate(out: *mut u64, size: usize, properties: *const AllocationProperties, flags: u64) {
        addr: read(out), size: size, location: location_of(properties)
    }, within {
        MemorySource::Location(location_of(properties)), size, undo: release(take(out))
    }
    cuMemRelease(handle: u64) { addr: handle }
    cuMemMap(addr: u64, size: usize, offset: usize, handle: u64, flags: u64) {
        addr: addr, size: size, stream: handle
    }
    cuMemUnmap(addr: u64, size: usize) { addr: addr, size: size }
    cuMemAddressReserve(out: *mut u64, size: usize, alignment: usize, hint: u64, flags: u64) {
        addr: read(out), size: size
    }
    cuMemAddressFree(addr: u64, size: usize) { addr: addr, size: size }
    cuMemHostAlloc(out: *mut u64, size: usize, flags: u32) { addr: read(out), size: size }
    cuMemAllocHost_v2(out: *mut u64, size: usize) { addr: read(out), size: size }
    cuMemHostRegister_v2(addr: u64, size: usize, flags: u32) { addr: addr, size: size }
    cuMemHostUnregister(addr: u64) { addr: addr }
    cuMemFreeHost(addr: u64) { addr: addr }
    cuArrayCreate_v2(out: *mut u64, descriptor: *const ArrayDescriptor) {
        addr: read(out), size: array_2d_bytes(descriptor)
    }, within {
        MemorySource::Current, array_2d_bytes(descriptor), undo: destroy_array(take(out))
    }
    cuArray3DCreate_v2(out: *mut u64, descriptor: *const Array3dDescriptor) {
        addr: read(out), size: array_3d_bytes(descriptor)
    }, within {
        MemorySource::Current, array_3d_bytes(descriptor), undo: destroy_array(take(out))
    }
    cuArrayDestroy(handle: u64) { addr: handle }
    cuMipmappedArrayCreate(out: *mut u64, descriptor: *const Array3dDescriptor, levels: u32) {
        addr: read(out), size: mipmap_bytes(array_3d_bytes(descriptor), levels, false)
    }, within {
        MemorySource::Current, mipmap_bytes(array_3d_bytes(descriptor), levels, false),
        undo: destroy_mipmapped_array(take(out))
    }
    cuMipmappedArrayDestroy(handle: u64) { addr: handle }
    cuIpcOpenMemHandle_v2(out: *mut u64, handle: IpcHandle, flags: u32) {
        addr: read(out), size: imported_size(read(out)), stream: handle.hash()
    }
    cuIpcCloseMemHandle(addr: u64) { addr: addr }
    cuIpcGetMemHandle(out: *mut IpcHandle, addr: u64) { addr: addr, stream: hash_at(out) }
    cuMemImportFromShareableHandle(out: *mut u64, shared: *mut c_void, kind: u32) {
        addr: read(out), location: location::of_handle(read(out))
    }
    cuMemRetainAllocationHandle(out: *mut u64, addr: u64) { addr: read(out) }
    cuMemPoolTrimTo(pool: u64, keep: usize) { addr: pool }
    cuDevicePrimaryCtxRetain(out: *mut u64, device: i32) {
        is_new: contexts::lacks_primary(device), context: out, device: device
    }
    cuCtxCreate(out: *mut u64, flags: u32, device: i32) { is_new: true, context: out, device: device }
    cuCtxCreate_v2(out: *mut u64, flags: u32, device: i32) { is_new: true, context: out, device: device }
    cuCtxCreate_v3(out: *mut u64, affinity: *mut c_void, count: i32, flags: u32, device: i32) {
        is_new: true, context: out, device: device
    }
    cuCtxCreate_v4(out: *mut u64, parameters: *mut c_void, flags: u32, device: i32) {
        is_new: true, context: out, device: device
    }
    cuModuleLoad(out: *mut u64, file: *const c_char) { }
    cuModuleLoadData(out: *mut u64, image: *const c_void) { }
    cuModuleLoadDataEx(
        out: *mut u64, image: *const c_void, count: u32, options: *mut i32, values: *mut *mut c_void
    ) { }
    cuModuleLoadFatBinary(out: *mut u64, image: *const c_void) { }
    cuLibraryLoadData(
        out: *mut u64, code: *const c_void, jit_options: *mut i32, jit_values: *mut *mut c_void, jit_count: u32,
        options: *mut i32, values: *mut *mut c_void, count: u32
    ) { }
    cuLibraryLoadFromFile(
        out: *mut u64, file: *const c_char, jit_options: *mut i32, jit_values: *mut *mut c_void, jit_count: u32,
        options: *mut i32, values: *mut *mut c_void, count: u32
    ) { }
    cuStreamBeginCapture_v2(stream: u64, mode: i32) { stream: stream }
    cuStreamBeginCapture_v2_ptsz(stream: u64, mode: i32) { stream: stream }
    cuStreamBeginCaptureToGraph(
        stream: u64, graph: u64, dependencies: *const u64, edges: *const c_void, count: usize, mode: i32
    ) { stream: stream }
    cuStreamBeginCaptureToGraph_ptsz(
        stream: u64, graph: u64, dependencies: *const u64, edges: *const c_void, count: usize, mode: i32
    ) { stream: stream }
    cuStreamEndCapture(stream: u64, out: *mut u64) {
        addr: read(out), size: graphs::node_count(read(out)), stream: stream
    }
    cuStreamEndCapture_ptsz(stream: u64, out: *mut u64) {
        addr: read(out), size: graphs::node_count(read(out)), stream: stream
    }
    cuGraphInstantiate_v2(
        out: *mut u64, graph: u64, error_node: *mut u64, log: *mut i8, log_size: usize
    ) { addr: read(out), stream: graph }, within {
        MemorySource::Current, 0u64, undo: destroy_graph(take(out))
    }
    cuGraphInstantiateWithFlags(out: *mut u64, graph: u64, flags: u64) {
        addr: read(out), stream: graph
    }, within {
        MemorySource::Current, 0u64, undo: destroy_graph(take(out))
    }
    cuGraphInstantiateWithParams(out: *mut u64, graph: u64, params: *mut c_void) {
        addr: read(out), stream: graph
    }, within {
        MemorySource::Current, 0u64, undo: destroy_graph(take(out))
    }
    cuGraphInstantiateWithParams_ptsz(out: *mut u64, graph: u64, params: *mut c_void) {
        addr: read(out), stream: graph
    }, within {
        MemorySource::Current, 0u64, undo: destroy_graph(take(out))
    }
    cuGraphUpload(executable: u64, stream: u64) { addr: executable }
    cuGraphUpload_ptsz(executable: u64, stream: u64) { addr: executable }
    cuGraphExecDestroy(executable: u64) { addr: executable }
    cudaMalloc(out: *mut u64, size: usize) { addr: read(out), size: size }
    cudaMallocPitch(out: *mut u64, pitch: *mut usize, width: usize, height: usize) {
        addr: read(out), size: pitched_bytes(read(pitch), width, height, 1)
    }
    cudaMalloc3D(out: *mut PitchedPtr, extent: Extent) {
        addr: read(out).ptr, size: pitched_bytes(read(out).pitch, extent.width, extent.height, extent.depth)
    }
    cudaMallocManaged(out: *mut u64, size: usize, flags: u32) { addr: read(out), size: size }
    cudaMallocAsync(out: *mut u64, size: usize, stream: u64) { addr: read(out), size: size, stream: stream }
    cudaMallocAsync_ptsz(out: *mut u64, size: usize, stream: u64) { addr: read(out), size: size, stream: stream }
    cudaMallocFromPoolAsync(out: *mut u64, size: usize, pool: *mut c_void, stream: u64) {
        addr: read(out), size: size, stream: stream
    }
    cudaMallocFromPoolAsync_ptsz(out: *mut u64, size: usize, pool: *mut c_void, stream: u64) {
        addr: read(out), size: size, stream: stream
    }
    cudaFreeAsync(addr: u64, stream: u64) { addr: addr, stream: stream }
    cudaFreeAsync_ptsz(addr: u64, stream: u64) { addr: addr, stream: stream }
    cudaFree(addr: u64) { addr: addr }
    cudaMallocHost(out: *mut u64, size: usize) { addr: read(out), size: size }
    cudaHostAlloc(out: *mut u64, size: usize, flags: u32) { addr: read(out), size: size }
    cudaHostRegister(addr: u64, size: usize, flags: u32) { addr: addr, size: size }
    cudaHostUnregister(addr: u64) { addr: addr }
    cudaFreeHost(addr: u64) { addr: addr }
    cudaMallocArray(out: *mut u64, format: *const ChannelFormat, width: usize, height: usize, flags: u32) {
        addr: read(out), size: channel_array_bytes(format, Extent { width, height, depth: 1 })
    }
    cudaMalloc3DArray(out: *mut u64, format: *const ChannelFormat, extent: Extent, flags: u32) {
        addr: read(out), size: channel_array_bytes(format, extent)
    }
    cudaFreeArray(handle: u64) { addr: handle }
    cudaMallocMipmappedArray(
        out: *mut u64, format: *const ChannelFormat, extent: Extent, levels: u32, flags: u32
    ) {
        addr: read(out), size: mipmap_bytes(channel_array_bytes(format, extent), levels, extent.depth > 1)
    }
    cudaFreeMipmappedArray(handle: u64) { addr: handle }
    cudaIpcOpenMemHandle(out: *mut u64, handle: IpcHandle, flags: u32) {
        addr: read(out), size: imported_size(read(out)), stream: handle.hash()
    }
    cudaIpcCloseMemHandle(addr: u64) { addr: addr }
    cudaIpcGetMemHandle(out: *mut IpcHandle, addr: u64) { addr: addr, stream: hash_at(out) }
}
