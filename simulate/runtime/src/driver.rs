//! The driver's functions, found in the same way as the real runtime finds them.

use simcuda::abi::{AccessDesc, Array3dDescriptor, ArrayDescriptor, IpcHandle, PoolProps};
use simcuda::bridge::{Bridge, ID};
use simcuda::out::Out;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

type GetProcAddress = unsafe extern "C" fn(*const c_char, Out<*mut c_void>, c_int, u64, Out<c_int>) -> c_int;
type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;
type StreamCallback = Option<unsafe extern "C" fn(u64, c_int, *mut c_void)>;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
const PER_THREAD: u64 = 2;

/// The CUDA version of this library: 1000 * major + 10 * minor. The file's copy of it is overwritten for each PyTorch.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
static simcuda_cudart_version: AtomicI32 = AtomicI32::new(13000);

/// The CUDA version of this library: 1000 * major + 10 * minor.
pub(crate) fn version() -> c_int {
    simcuda_cudart_version.load(Relaxed)
}

fn die(what: &str) -> ! {
    eprintln!("simcuda: the runtime cannot find the driver's {what}: were both installed by the same build?");
    std::process::abort()
}

/// Declares the table: the field, the name of the function, the flags of the lookup, and the arguments.
///
/// The functions under `unsafe` dereference pointers of the program other than out-pointers.
macro_rules! functions {
    (
        safe { $($safe:ident = $safe_name:literal, $safe_flags:expr, ($($safe_argument:ty),*);)* }
        unsafe { $($field:ident = $name:literal, $flags:expr, ($($argument:ty),*);)* }
    ) => {
        /// The driver's functions that the runtime needs.
        pub(crate) struct Driver {
            /// The entry point through which all others are found.
            pub(crate) get_proc_address: GetProcAddress,
            /// The driver's private table.
            pub(crate) bridge: &'static Bridge,
            $(pub(crate) $safe: extern "C" fn($($safe_argument),*) -> c_int,)*
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Driver {
            fn load() -> Self {
                let get_proc_address = entry_point();
                let look_up = |name: &CStr, flags: u64| -> *mut c_void {
                    let mut found = ptr::null_mut();
                    let out = Out::from(&mut found);
                    // SAFETY: `name` is a NUL-terminated string, `out` refers to a local variable, and the status
                    // pointer may be null.
                    unsafe { get_proc_address(name.as_ptr(), out, version(), flags, Out::NONE) };
                    if found.is_null() { die(&name.to_string_lossy()) } else { found }
                };
                Driver {
                    get_proc_address,
                    bridge: bridge(look_up(c"cuGetExportTable", 0)),
                    // SAFETY: the driver's function of that name has that type, because one build compiles both from
                    // these sources.
                    $($safe: unsafe {
                        transmute::<*mut c_void, extern "C" fn($($safe_argument),*) -> c_int>(
                            look_up($safe_name, $safe_flags)
                        )
                    },)*
                    // SAFETY: the driver's function of that name has that type, because one build compiles both from
                    // these sources.
                    $($field: unsafe {
                        transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(look_up($name, $flags))
                    },)*
                }
            }
        }
    };
}

functions! {
    safe {
        init = c"cuInit", 0, (c_uint);
        driver_get_version = c"cuDriverGetVersion", 0, (Out<c_int>);
        device_get_count = c"cuDeviceGetCount", 0, (Out<c_int>);
        device_total_mem = c"cuDeviceTotalMem", 0, (Out<usize>, c_int);
        device_get_uuid = c"cuDeviceGetUuid", 0, (Out<[u8; 16]>, c_int);
        device_get_attribute = c"cuDeviceGetAttribute", 0, (Out<c_int>, c_int, c_int);
        device_can_access_peer = c"cuDeviceCanAccessPeer", 0, (Out<c_int>, c_int, c_int);
        primary_ctx_retain = c"cuDevicePrimaryCtxRetain", 0, (Out<u64>, c_int);
        ctx_get_current = c"cuCtxGetCurrent", 0, (Out<u64>);
        ctx_set_current = c"cuCtxSetCurrent", 0, (u64);
        ctx_get_device = c"cuCtxGetDevice", 0, (Out<c_int>);
        ctx_get_limit = c"cuCtxGetLimit", 0, (Out<usize>, c_int);
        ctx_set_limit = c"cuCtxSetLimit", 0, (c_int, usize);
        ctx_synchronize = c"cuCtxSynchronize", 0, ();
        ctx_get_stream_priority_range = c"cuCtxGetStreamPriorityRange", 0, (Out<c_int>, Out<c_int>);
        mem_get_info = c"cuMemGetInfo", 0, (Out<usize>, Out<usize>);
        mem_alloc = c"cuMemAlloc", 0, (Out<u64>, usize);
        mem_alloc_pitch = c"cuMemAllocPitch", 0, (Out<u64>, Out<usize>, usize, usize, c_uint);
        mem_alloc_managed = c"cuMemAllocManaged", 0, (Out<u64>, usize, c_uint);
        mem_free = c"cuMemFree", 0, (u64);
        mem_host_alloc = c"cuMemHostAlloc", 0, (Out<u64>, usize, c_uint);
        mem_free_host = c"cuMemFreeHost", 0, (u64);
        mem_host_register = c"cuMemHostRegister", 0, (u64, usize, c_uint);
        mem_host_unregister = c"cuMemHostUnregister", 0, (u64);
        mem_alloc_async = c"cuMemAllocAsync", 0, (Out<u64>, usize, u64);
        mem_alloc_async_ptsz = c"cuMemAllocAsync", PER_THREAD, (Out<u64>, usize, u64);
        mem_alloc_from_pool_async = c"cuMemAllocFromPoolAsync", 0, (Out<u64>, usize, u64, u64);
        mem_alloc_from_pool_async_ptsz = c"cuMemAllocFromPoolAsync", PER_THREAD, (Out<u64>, usize, u64, u64);
        mem_free_async = c"cuMemFreeAsync", 0, (u64, u64);
        mem_free_async_ptsz = c"cuMemFreeAsync", PER_THREAD, (u64, u64);
        device_get_default_mem_pool = c"cuDeviceGetDefaultMemPool", 0, (Out<u64>, c_int);
        device_get_mem_pool = c"cuDeviceGetMemPool", 0, (Out<u64>, c_int);
        device_set_mem_pool = c"cuDeviceSetMemPool", 0, (c_int, u64);
        mem_pool_destroy = c"cuMemPoolDestroy", 0, (u64);
        mem_pool_trim_to = c"cuMemPoolTrimTo", 0, (u64, usize);
        mem_pool_get_attribute = c"cuMemPoolGetAttribute", 0, (u64, c_int, *mut c_void);
        pointer_get_attribute = c"cuPointerGetAttribute", 0, (*mut c_void, c_int, u64);
        array_destroy = c"cuArrayDestroy", 0, (u64);
        mipmapped_array_destroy = c"cuMipmappedArrayDestroy", 0, (u64);
        ipc_get_mem_handle = c"cuIpcGetMemHandle", 0, (Out<IpcHandle>, u64);
        ipc_open_mem_handle = c"cuIpcOpenMemHandle", 0, (Out<u64>, IpcHandle, c_uint);
        ipc_close_mem_handle = c"cuIpcCloseMemHandle", 0, (u64);
        ipc_get_event_handle = c"cuIpcGetEventHandle", 0, (Out<IpcHandle>, u64);
        ipc_open_event_handle = c"cuIpcOpenEventHandle", 0, (Out<u64>, IpcHandle);
        stream_create = c"cuStreamCreateWithPriority", 0, (Out<u64>, c_uint, c_int);
        stream_destroy = c"cuStreamDestroy", 0, (u64);
        stream_query = c"cuStreamQuery", 0, (u64);
        stream_synchronize = c"cuStreamSynchronize", 0, (u64);
        stream_wait_event = c"cuStreamWaitEvent", 0, (u64, u64, c_uint);
        stream_get_priority = c"cuStreamGetPriority", 0, (u64, Out<c_int>);
        stream_get_flags = c"cuStreamGetFlags", 0, (u64, Out<c_uint>);
        stream_get_id = c"cuStreamGetId", 0, (u64, Out<u64>);
        event_create = c"cuEventCreate", 0, (Out<u64>, c_uint);
        event_destroy = c"cuEventDestroy", 0, (u64);
        event_record = c"cuEventRecord", 0, (u64, u64);
        event_query = c"cuEventQuery", 0, (u64);
        event_synchronize = c"cuEventSynchronize", 0, (u64);
        event_elapsed_time = c"cuEventElapsedTime", 0, (Out<f32>, u64, u64);
        stream_begin_capture = c"cuStreamBeginCapture", 0, (u64, c_int);
        stream_end_capture = c"cuStreamEndCapture", 0, (u64, Out<u64>);
        stream_is_capturing = c"cuStreamIsCapturing", 0, (u64, Out<c_int>);
        stream_get_capture_info = c"cuStreamGetCaptureInfo", 0,
            (u64, Out<c_int>, Out<u64>, Out<u64>, Out<*const c_void>, Out<*const c_void>, Out<usize>);
        exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode", 0, (Out<c_int>);
        graph_create = c"cuGraphCreate", 0, (Out<u64>, c_uint);
        graph_instantiate = c"cuGraphInstantiateWithFlags", 0, (Out<u64>, u64, u64);
        graph_launch = c"cuGraphLaunch", 0, (u64, u64);
        graph_destroy = c"cuGraphDestroy", 0, (u64);
        graph_exec_destroy = c"cuGraphExecDestroy", 0, (u64);
        graph_get_nodes = c"cuGraphGetNodes", 0, (u64, Out<u64>, Out<usize>);
    }
    unsafe {
        device_get_name = c"cuDeviceGetName", 0, (*mut c_char, c_int, c_int);
        device_get_pci_bus_id = c"cuDeviceGetPCIBusId", 0, (*mut c_char, c_int, c_int);
        device_get_by_pci_bus_id = c"cuDeviceGetByPCIBusId", 0, (Out<c_int>, *const c_char);
        mem_pool_create = c"cuMemPoolCreate", 0, (Out<u64>, *const PoolProps);
        mem_pool_set_access = c"cuMemPoolSetAccess", 0, (u64, *const AccessDesc, usize);
        mem_pool_set_attribute = c"cuMemPoolSetAttribute", 0, (u64, c_int, *const c_void);
        array_create = c"cuArrayCreate", 0, (Out<u64>, *const ArrayDescriptor);
        array_3d_create = c"cuArray3DCreate", 0, (Out<u64>, *const Array3dDescriptor);
        mipmapped_array_create = c"cuMipmappedArrayCreate", 0, (Out<u64>, *const Array3dDescriptor, c_uint);
        memcpy = c"cuMemcpy", 0, (u64, u64, usize);
        memcpy_async = c"cuMemcpyAsync", 0, (u64, u64, usize, u64);
        memset_async = c"cuMemsetD8Async", 0, (u64, u8, usize, u64);
        stream_add_callback = c"cuStreamAddCallback", 0, (u64, StreamCallback, *mut c_void, c_uint);
        launch_host_func = c"cuLaunchHostFunc", 0, (u64, HostFunction, *mut c_void);
    }
}

/// The driver's `cuGetProcAddress_v2`, found through the dynamic linker.
fn entry_point() -> GetProcAddress {
    // SAFETY: both names are NUL-terminated strings. The initializers of the simulated driver are safe to run at any
    // time.
    let found = unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL);
        if library.is_null() {
            die("library libcuda.so.1");
        }
        libc::dlsym(library, c"cuGetProcAddress_v2".as_ptr())
    };
    if found.is_null() {
        die("cuGetProcAddress_v2");
    }
    // SAFETY: `found` is not null, and the driver's function of that name has that type.
    unsafe { transmute::<*mut c_void, GetProcAddress>(found) }
}

fn bridge(get_export_table: *mut c_void) -> &'static Bridge {
    type GetExportTable = unsafe extern "C" fn(*mut *const Bridge, *const [u8; 16]) -> c_int;
    let mut table = ptr::null();
    // SAFETY: the driver's function of that name has that type. The table under this identifier is a `Bridge`. It lives
    // as long as the driver, which is never unloaded.
    let bridge = unsafe {
        transmute::<*mut c_void, GetExportTable>(get_export_table)(&mut table, &ID);
        table.as_ref()
    };
    bridge.unwrap_or_else(|| die("private table"))
}

/// The driver's functions, found on first use.
pub(crate) fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let driver = Driver::load();
        (driver.init)(0);
        driver
    })
}
