//! Device memory that the libraries allocate for themselves, through the driver.
//!
//! They find the driver's functions as NVIDIA's libraries do, whose own copy of the runtime asks `cuGetProcAddress`. A
//! tracer that answers `dlsym` therefore sees these calls, made from inside the library.

use simcuda::abi::{AccessDesc, AllocationProp, Location};
use simcuda::out::Out;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::OnceLock;

/// The CUDA version whose functions are looked up.
const VERSION: c_int = 12000;
/// `CU_MEM_ALLOCATION_TYPE_PINNED` and `CU_MEM_LOCATION_TYPE_DEVICE`
const PINNED: i32 = 1;
const DEVICE: i32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
const READ_WRITE: u32 = 3;

/// Declares the table: the field, the name of the function, and its type.
macro_rules! functions {
    ($($field:ident = $name:literal: $type:ty;)*) => {
        /// The driver's functions for memory.
        struct Driver {
            $($field: $type,)*
        }

        impl Driver {
            /// The table, from a function that looks names up. `None` if the driver lacks one.
            fn new(look_up: impl Fn(&CStr) -> Option<*mut c_void>) -> Option<Self> {
                Some(Driver {
                    // SAFETY: the driver's function of that name has that type.
                    $($field: unsafe { transmute::<*mut c_void, $type>(look_up($name)?) },)*
                })
            }
        }
    };
}

functions! {
    ctx_get_current = c"cuCtxGetCurrent": extern "C" fn(Out<u64>) -> c_int;
    ctx_get_device = c"cuCtxGetDevice": extern "C" fn(Out<c_int>) -> c_int;
    ctx_set_current = c"cuCtxSetCurrent": extern "C" fn(u64) -> c_int;
    primary_ctx_retain = c"cuDevicePrimaryCtxRetain": extern "C" fn(Out<u64>, c_int) -> c_int;
    mem_alloc = c"cuMemAlloc": extern "C" fn(Out<u64>, usize) -> c_int;
    mem_free = c"cuMemFree": extern "C" fn(u64) -> c_int;
    mem_address_reserve = c"cuMemAddressReserve": extern "C" fn(Out<u64>, usize, usize, u64, u64) -> c_int;
    mem_address_free = c"cuMemAddressFree": extern "C" fn(u64, usize) -> c_int;
    mem_create = c"cuMemCreate": unsafe extern "C" fn(Out<u64>, usize, *const AllocationProp, u64) -> c_int;
    mem_release = c"cuMemRelease": extern "C" fn(u64) -> c_int;
    mem_map = c"cuMemMap": extern "C" fn(u64, usize, usize, u64, u64) -> c_int;
    mem_unmap = c"cuMemUnmap": extern "C" fn(u64, usize) -> c_int;
    mem_set_access = c"cuMemSetAccess": unsafe extern "C" fn(u64, usize, *const AccessDesc, usize) -> c_int;
}

impl Driver {
    /// Looks the functions up. `None` without a driver.
    fn load() -> Option<Self> {
        type GetProcAddress = unsafe extern "C" fn(*const c_char, Out<*mut c_void>, c_int, u64, Out<c_int>) -> c_int;
        // SAFETY: both names are NUL-terminated strings, and the results are checked for null. The driver's function of
        // that name has that type.
        let get_proc_address = unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL);
            let found =
                if library.is_null() { ptr::null_mut() } else { libc::dlsym(library, c"cuGetProcAddress_v2".as_ptr()) };
            if found.is_null() {
                return None;
            }
            transmute::<*mut c_void, GetProcAddress>(found)
        };
        Driver::new(|name| {
            let mut found = ptr::null_mut();
            // SAFETY: `name` is a NUL-terminated string, the result is a local variable, and the status may be null.
            unsafe { get_proc_address(name.as_ptr(), Out::from(&mut found), VERSION, 0, Out::NONE) };
            (!found.is_null()).then_some(found)
        })
    }

    /// The functions, with a context current on this thread: without one, the primary context of device 0. `None` if
    /// that fails.
    fn ready() -> Option<&'static Self> {
        static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
        let driver = DRIVER.get_or_init(Driver::load).as_ref()?;
        let mut context = 0;
        (driver.ctx_get_current)(Out::from(&mut context));
        if context == 0 {
            let made =
                (driver.primary_ctx_retain)(Out::from(&mut context), 0) == 0 && (driver.ctx_set_current)(context) == 0;
            return made.then_some(driver);
        }
        Some(driver)
    }
}

/// Memory of `cuMemAlloc`, which is freed when this is dropped.
#[derive(Debug)]
pub(crate) struct LinearMemory {
    address: u64,
}

impl LinearMemory {
    /// Allocates on the current device. `None` if the device has too little memory.
    pub(crate) fn allocate(bytes: u64) -> Option<Self> {
        let mut address = 0;
        let status = (Driver::ready()?.mem_alloc)(Out::from(&mut address), bytes as usize);
        (status == 0).then_some(LinearMemory { address })
    }
}

impl Drop for LinearMemory {
    fn drop(&mut self) {
        if let Some(driver) = Driver::ready() {
            (driver.mem_free)(self.address);
        }
    }
}

/// Memory of `cuMemCreate` that is mapped at an address of its own, and is released when this is dropped.
#[derive(Debug)]
pub(crate) struct MappedMemory {
    address: u64,
    handle: u64,
    bytes: usize,
}

impl MappedMemory {
    /// Allocates on the current device. `None` if the device has too little memory.
    pub(crate) fn allocate(bytes: u64) -> Option<Self> {
        let driver = Driver::ready()?;
        let (mut device, mut handle, mut address) = (0, 0, 0);
        (driver.ctx_get_device)(Out::from(&mut device));
        let location = Location { kind: DEVICE, id: device };
        let properties =
            AllocationProp { kind: PINNED, handle_types: 0, location, win32: ptr::null_mut(), flags: [0; 8] };
        let access = AccessDesc { location, flags: READ_WRITE };
        let bytes = bytes as usize;
        // SAFETY: the properties are a structure of that type.
        if unsafe { (driver.mem_create)(Out::from(&mut handle), bytes, &properties, 0) } != 0 {
            return None;
        }
        let mut memory = MappedMemory { address: 0, handle, bytes };
        if (driver.mem_address_reserve)(Out::from(&mut address), bytes, 0, 0, 0) != 0 {
            return None;
        }
        memory.address = address;
        // SAFETY: `access` is one structure of that type.
        let status = (driver.mem_map)(address, bytes, 0, handle, 0)
            + unsafe { (driver.mem_set_access)(address, bytes, &access, 1) };
        (status == 0).then_some(memory)
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        let Some(driver) = Driver::ready() else { return };
        if self.address != 0 {
            (driver.mem_unmap)(self.address, self.bytes);
            (driver.mem_address_free)(self.address, self.bytes);
        }
        (driver.mem_release)(self.handle);
    }
}
