//! Shared parts of the simulated libraries: handles, the connection to the simulated driver, and the entry for
//! generated stubs.

use simcuda::bridge::{Bridge, ID};
use simcuda::library_memory::Kernels;
use simcuda::out::Out;
use simcuda::stub::Call;
use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::OnceLock;

/// The file of the driver.
const DRIVER: &str = "libcuda.so.1";

/// An opaque handle. It stores what the program sets, and has space for fields that a library of another version may
/// read.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Handle {
    /// The stream that was set last.
    pub(crate) stream: u64,
    /// Unused space.
    room: [u64; 31],
}

/// Creates a handle.
pub(crate) fn create(out: Out<Box<Handle>>) -> c_int {
    out.put(Box::default());
    0
}

/// The simulated driver, or null: that beside this library, if there is one. A process that loads the simulated NVML by
/// its path needs no other setting.
fn driver() -> *mut c_void {
    let open = |path: &CStr| {
        // SAFETY: the path is a NUL-terminated string, and the initializers of the simulated driver can run at any
        // time.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) }
    };
    // SAFETY: `dladdr` accepts any address, and `found` is valid for writes. The name that it gives is a NUL-terminated
    // string that lives as long as this library.
    let own = unsafe {
        let mut found: libc::Dl_info = std::mem::zeroed();
        let is_known =
            libc::dladdr(driver as fn() -> *mut c_void as *const c_void, &mut found) != 0 && !found.dli_fname.is_null();
        if is_known { CStr::from_ptr(found.dli_fname).to_string_lossy() } else { "".into() }
    };
    let beside = own.rsplit_once('/').and_then(|(folder, _)| CString::new(format!("{folder}/{DRIVER}")).ok());
    let found = beside.map_or(ptr::null_mut(), |path| open(&path));
    if found.is_null() { open(c"libcuda.so.1") } else { found }
}

/// The driver's private table. `None` without the simulated driver.
pub(crate) fn bridge() -> Option<&'static Bridge> {
    static BRIDGE: OnceLock<Option<&'static Bridge>> = OnceLock::new();
    *BRIDGE.get_or_init(|| {
        type GetExportTable = unsafe extern "C" fn(*mut *const Bridge, *const [u8; 16]) -> c_int;
        // SAFETY: both names are NUL-terminated strings, and the results are checked for null. The driver's function of
        // that name has that type. Its table lives as long as the driver, which is never unloaded.
        unsafe {
            let library = driver();
            if library.is_null() {
                return None;
            }
            let found = libc::dlsym(library, c"cuGetExportTable".as_ptr());
            if found.is_null() {
                return None;
            }
            let mut table = ptr::null();
            transmute::<*mut c_void, GetExportTable>(found)(&mut table, &ID);
            table.as_ref()
        }
    })
}

/// Adds one unit of work to a stream.
pub(crate) fn launch(stream: u64) {
    if let Some(bridge) = bridge() {
        (bridge.launch)(stream);
    }
}

/// Whether the libraries take device memory for themselves, as on a GPU.
pub(crate) fn takes_memory() -> bool {
    bridge().is_some_and(|bridge| (bridge.library_memory)())
}

/// The number of NVLink links of each device.
pub(crate) fn nvlinks() -> u32 {
    bridge().map_or(0, |bridge| (bridge.nvlinks)())
}

/// Loads kernels onto the current device if they are not there yet. Returns whether the device has the memory.
pub(crate) fn load(kernels: Kernels) -> bool {
    bridge().is_none_or(|bridge| (bridge.load)(kernels as u32) == 0)
}

simcuda::stub_entry!(stub_called_in_library);

/// `NVML_ERROR_FUNCTION_NOT_FOUND`, which an older driver returns for a function that it lacks.
pub(crate) const NVML_FUNCTION_NOT_FOUND: c_int = 13;
/// `CUBLAS_STATUS_ALLOC_FAILED`
pub(crate) const CUBLAS_ALLOC_FAILED: c_int = 3;
/// `CUSOLVER_STATUS_ALLOC_FAILED`
pub(crate) const CUSOLVER_ALLOC_FAILED: c_int = 2;
/// `CUDNN_STATUS_ALLOC_FAILED`
pub(crate) const CUDNN_ALLOC_FAILED: c_int = 4003;

/// Counts a call of a generated stub and writes its outputs. Fails if the kernels that it would launch find no memory.
fn stub_called_in_library(call: Call) -> c_int {
    if let Some(bridge) = bridge() {
        // SAFETY: the name is a NUL-terminated string that lives forever.
        unsafe { (bridge.stub)(call.name().as_ptr()) };
    }
    if call.name().to_bytes().starts_with(b"nvml") {
        return NVML_FUNCTION_NOT_FOUND;
    }
    if let Some(kernels) = Kernels::of_function(&call.name().to_string_lossy()).filter(|_| takes_memory())
        && !load(kernels)
    {
        return match kernels {
            Kernels::Cusolver => CUSOLVER_ALLOC_FAILED,
            Kernels::CudnnRecurrent | Kernels::CudnnRecurrentBackward => CUDNN_ALLOC_FAILED,
            _ => CUBLAS_ALLOC_FAILED,
        };
    }
    call.write_outputs(|| Box::into_raw(Box::<Handle>::default()).cast());
    0
}

/// Declares functions that create or destroy a handle. Their other arguments are ignored.
macro_rules! handles {
    ($($create:ident $(/ $destroy:ident)?;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $create(out: simcuda::out::Out<Box<$crate::support::Handle>>) -> std::ffi::c_int {
            $crate::support::create(out)
        }
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $destroy(_handle: Option<Box<$crate::support::Handle>>) -> std::ffi::c_int {
                0
            }
        )?
    )*};
}
pub(crate) use handles;

/// Declares functions that create or destroy an object of a type.
macro_rules! objects {
    ($($create:ident / $destroy:ident: $type:ty;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $create(out: simcuda::out::Out<Box<$type>>) -> std::ffi::c_int {
            out.put(Box::default());
            0
        }

        #[unsafe(no_mangle)]
        extern "C" fn $destroy(_object: Option<Box<$type>>) -> std::ffi::c_int {
            0
        }
    )*};
}
pub(crate) use objects;
