//! Shared parts of the simulated libraries: handles, the connection to the simulated driver, and the entry for
//! generated stubs.

use simcuda::bridge::{Bridge, ID};
use simcuda::out::Out;
use simcuda::stub::Call;
use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::OnceLock;

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

/// The driver's private table. `None` without the simulated driver.
pub(crate) fn bridge() -> Option<&'static Bridge> {
    static BRIDGE: OnceLock<Option<&'static Bridge>> = OnceLock::new();
    *BRIDGE.get_or_init(|| {
        type GetExportTable = unsafe extern "C" fn(*mut *const Bridge, *const [u8; 16]) -> c_int;
        // SAFETY: both names are NUL-terminated strings, and the results are checked for null. The driver's function of
        // that name has that type. Its table lives as long as the driver, which is never unloaded.
        unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL);
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

simcuda::stub_entry!(stub_called_in_library);

/// Counts a call of a generated stub and writes its outputs.
fn stub_called_in_library(call: Call) {
    if let Some(bridge) = bridge() {
        // SAFETY: the name is a NUL-terminated string that lives forever.
        unsafe { (bridge.stub)(call.name().as_ptr()) };
    }
    call.write_outputs(|| Box::into_raw(Box::<Handle>::default()).cast());
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
