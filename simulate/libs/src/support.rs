//! What the stand-ins share: handles, the way to the simulated driver, and the entry for generated stubs.

use simcuda::bridge::{Bridge, ID};
use simcuda::out::Out;
use std::ffi::{c_char, c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::OnceLock;

/// An opaque handle: what the program may set on it and ask back, and room for whatever a library of another version
/// may look at.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Handle {
    /// The stream set last.
    pub(crate) stream: u64,
    /// Nothing.
    room: [u64; 31],
}

/// Makes a handle.
pub(crate) fn create(out: Out<Box<Handle>>) -> c_int {
    out.put(Box::default());
    0
}

/// The driver's private table; None where there is no simulated driver.
pub(crate) fn bridge() -> Option<&'static Bridge> {
    static BRIDGE: OnceLock<Option<&'static Bridge>> = OnceLock::new();
    *BRIDGE.get_or_init(|| {
        type GetExportTable = unsafe extern "C" fn(*mut *const Bridge, *const [u8; 16]) -> c_int;
        // SAFETY: C strings; the driver's function of that name has that type, and its table lives for ever.
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

/// One unit of work for a stream.
pub(crate) fn launch(stream: u64) {
    if let Some(bridge) = bridge() {
        (bridge.launch)(stream);
    }
}

/// The generated stubs call this with their name.
#[unsafe(no_mangle)]
unsafe extern "C" fn simcuda_stub(name: *const c_char) {
    if let Some(bridge) = bridge() {
        // SAFETY: the stubs pass string literals.
        unsafe { (bridge.stub)(name) };
    }
}

/// The generated stubs of functions that create something take their handle from here.
#[unsafe(no_mangle)]
extern "C" fn simcuda_handle() -> *mut c_void {
    Box::into_raw(Box::<Handle>::default()).cast()
}

/// Declares functions that make or end a handle; what else they are given is not looked at.
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
