//! cuSPARSE and cuSOLVER: handles. `simcuda-build` generates the functions that return a size or create other objects.

use crate::device_memory::LinearMemory;
use crate::support::{CUSOLVER_ALLOC_FAILED, Handle, handles, takes_memory};
use simcuda::library_memory::CUSOLVER_HANDLE_BYTES;
use simcuda::out::Out;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;

handles! {
    cusparseCreate / cusparseDestroy;
}

/// The object to which a `cusolverDnHandle_t` points.
#[repr(C)]
struct Solver {
    handle: Handle,
    /// The handle of cuBLAS that it made, and the function that destroys it.
    cublas: Option<(*mut c_void, Destroy)>,
    /// The memory that it allocates for itself.
    memory: Option<LinearMemory>,
}

type Create = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;

/// Makes a handle of the cuBLAS of this process. `None` if there is no cuBLAS, and an error if that has too little
/// memory.
fn create_cublas() -> Result<Option<(*mut c_void, Destroy)>, c_int> {
    // SAFETY: the names are NUL-terminated strings, and the results are checked for null. cuBLAS's functions of these
    // names have these types.
    unsafe {
        let open = |name: &CStr| libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let library = [c"libcublas.so.13", c"libcublas.so.12"].into_iter().map(open).find(|library| !library.is_null());
        let Some(library) = library else { return Ok(None) };
        let functions = [c"cublasCreate_v2", c"cublasDestroy_v2"].map(|name| libc::dlsym(library, name.as_ptr()));
        if functions.iter().any(|function| function.is_null()) {
            return Ok(None);
        }
        let (create, destroy) =
            (transmute::<*mut c_void, Create>(functions[0]), transmute::<*mut c_void, Destroy>(functions[1]));
        let mut handle = std::ptr::null_mut();
        if create(&mut handle) == 0 { Ok(Some((handle, destroy))) } else { Err(CUSOLVER_ALLOC_FAILED) }
    }
}

/// Creates a handle. As in the real library, it allocates device memory, itself and through a handle of cuBLAS.
#[unsafe(no_mangle)]
extern "C" fn cusolverDnCreate(out: Out<Box<Solver>>) -> c_int {
    let mut solver = Box::new(Solver { handle: Handle::default(), cublas: None, memory: None });
    if takes_memory() {
        match create_cublas() {
            Ok(cublas) => solver.cublas = cublas,
            Err(status) => return status,
        }
        solver.memory = LinearMemory::allocate(CUSOLVER_HANDLE_BYTES);
        if solver.memory.is_none() {
            return CUSOLVER_ALLOC_FAILED;
        }
    }
    out.put(solver);
    0
}

impl Drop for Solver {
    fn drop(&mut self) {
        if let Some((handle, destroy)) = self.cublas {
            // SAFETY: the handle is one of this cuBLAS, which is never unloaded.
            unsafe { destroy(handle) };
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn cusolverDnDestroy(solver: Option<Box<Solver>>) -> c_int {
    drop(solver);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cusolverDnSetStream(solver: Option<&mut Solver>, stream: u64) -> c_int {
    if let Some(solver) = solver {
        solver.handle.stream = stream;
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn cusparseGetErrorString(_status: c_int) -> *const c_char {
    c"simulated cuSPARSE status".as_ptr()
}
