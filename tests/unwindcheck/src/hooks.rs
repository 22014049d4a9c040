//! The functions that this library defines before the C library.
//!
//! The C library does not call them itself. So none of its own locks is held in a call.

use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use memtrace_stackwalk::loader::{unloaded, unloading};

use crate::stacks::compare_stack;

/// The next definition of a function, after this library's.
struct NextFunction(AtomicPtr<c_void>);

impl NextFunction {
    const fn new() -> NextFunction {
        NextFunction(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// The address of the function. `name` ends with a NUL.
    fn find(&self, name: &'static str) -> *mut c_void {
        let known = self.0.load(Relaxed);
        if !known.is_null() {
            return known;
        }
        debug_assert!(name.ends_with('\0'));
        // SAFETY: `name` ends with a NUL; `dlsym` has no other precondition.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast()) };
        if found.is_null() {
            // The C library has all of these functions, and no call can be answered without it.
            std::process::abort();
        }
        self.0.store(found, Relaxed);
        found
    }
}

macro_rules! hooks {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        ///
        /// The caller guarantees what the C library's function of this name requires.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            static NEXT: NextFunction = NextFunction::new();
            compare_stack();
            // SAFETY: `find` returns the function of this name, which has this signature. It gets the caller's
            // arguments.
            unsafe {
                let next: unsafe extern "C" fn($($type),*) -> $result =
                    transmute(NEXT.find(concat!(stringify!($name), "\0")));
                next($($argument),*)
            }
        }
    )*};
}

hooks! {
    /// PyTorch's caching allocator calls it for each block, in the innermost frames that memtrace records. The CUDA
    /// driver, NCCL, the autograd engine and the interpreter call it too.
    fn pthread_mutex_lock(mutex: *mut c_void) -> c_int;
    /// PyTorch's CPU allocator calls it for each tensor.
    fn posix_memalign(result: *mut *mut c_void, alignment: usize, size: usize) -> c_int;
    /// The CUDA driver and its simulation map memory.
    fn mmap(
        address: *mut c_void, length: usize, protection: c_int, flags: c_int, file: c_int, offset: i64
    ) -> *mut c_void;
    /// The CUDA driver calls its kernel module. The C library's function is variadic and reads at most this one
    /// argument more.
    fn ioctl(file: c_int, request: libc::c_ulong, argument: *mut c_void) -> c_int;
}

/// Reports an unload to the stack walker, as memtrace's hook of the same name does.
///
/// # Safety
///
/// The caller guarantees what the C library's `dlclose` requires.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dlclose(handle: *mut c_void) -> c_int {
    static NEXT: NextFunction = NextFunction::new();
    unloading();
    // SAFETY: `find` returns the next `dlclose`, which has this signature. It gets the caller's argument, and the
    // destructors of the object may unwind through this frame.
    let result = unsafe {
        let next: unsafe extern "C-unwind" fn(*mut c_void) -> c_int = transmute(NEXT.find("dlclose\0"));
        next(handle)
    };
    unloaded(true);
    result
}
