//! The functions of the C library that this library calls, bound to the C library itself.
//!
//! The loader would bind them to the first definition in the process: that of a sanitizer's runtime in the executable,
//! or of another preloaded library. The runtimes of ASAN, TSAN and MSAN look up the functions that they intercept with
//! `dlsym` while they initialize themselves. Our `dlsym` runs then, and their interceptors call null pointers until the
//! initialization has ended. TSAN would also report accesses of this library as data races of the program, because it
//! does not see our atomic operations.
//!
//! So each function has a hidden stub here that jumps to the C library's function. A stub finds the function at its
//! first call, with [`memtrace_stackwalk::loader`]. It leaves no frame and changes no argument register. The search
//! allocates no memory and calls only the functions of memory blocks, whose stubs start with simple implementations and
//! are bound to the C library's fast ones when a recording starts ([`bind_memory_functions`]).
//!
//! Functions whose definition is part of the program in glibc before 2.33 (`stat`, `fstat`) have no stub, because the C
//! library does not export them there. They are not called before a recording starts.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use super::original;
use crate::arch::{self, resolving_stubs};

resolving_stubs! { "memtrace_c", resolve,
    "clock_gettime" "clone" "close" "connect" "dladdr" "dlerror" "dlopen" "dl_iterate_phdr" "fchmod" "fcntl" "getcwd"
    "getenv" "getrlimit" "getsockopt" "kill" "lseek64" "madvise" "mmap" "mmap64" "mprotect" "mremap" "munmap"
    "nanosleep" "open" "open64" "prctl" "pread" "process_vm_readv" "pthread_attr_destroy" "pthread_attr_getstack"
    "pthread_create" "pthread_detach" "pthread_getattr_np" "pthread_self" "pthread_setcancelstate" "pthread_sigmask"
    "read" "readlink" "realpath"
    "recvmsg" "sched_yield" "send" "setsockopt" "sigdelset" "sigfillset" "socket" "strnlen" "symlinkat" "syscall"
    "unlinkat" "waitpid" "write" "__xpg_strerror_r"
}

/// Finds the function of a stub and stores it in `slot`.
unsafe extern "C" fn resolve(name: *const c_char, slot: *const AtomicPtr<c_void>) -> *mut c_void {
    // SAFETY: the stub passes its own C string and its own word.
    let (name, slot) = unsafe { (CStr::from_ptr(name), &*slot) };
    let found = original::c_library_function(name);
    if found.is_null() {
        return missing as *mut c_void;
    }
    slot.store(found, Ordering::Relaxed);
    found
}

/// The result of a function that the C library does not have: an error.
extern "C" fn missing() -> isize {
    -1
}

// The functions of memory blocks, each with a simple implementation to start with.
arch::jump_through_slot!("memcpy", "memtrace_slot_memcpy", arch::memcpy_code!());
arch::jump_through_slot!("memmove", "memtrace_slot_memmove", arch::memmove_code!());
arch::jump_through_slot!("memset", "memtrace_slot_memset", arch::memset_code!());
arch::jump_through_slot!("memcmp", "memtrace_slot_memcmp", arch::memcmp_code!());
arch::jump_through_slot!("strlen", "memtrace_slot_strlen", arch::strlen_code!());
// `bcmp` only reports whether there is a difference, as `memcmp` does.
arch::jump_through_slot!("bcmp", "memtrace_slot_memcmp");

// SAFETY: the stubs above define these words, which hold the address of a function at all times.
unsafe extern "C" {
    safe static memtrace_slot_memcpy: AtomicPtr<c_void>;
    safe static memtrace_slot_memmove: AtomicPtr<c_void>;
    safe static memtrace_slot_memset: AtomicPtr<c_void>;
    safe static memtrace_slot_memcmp: AtomicPtr<c_void>;
    safe static memtrace_slot_strlen: AtomicPtr<c_void>;
}

/// Binds the functions of memory blocks to the C library's, which are faster. Call it before a recording starts.
pub(crate) fn bind_memory_functions() {
    let functions: [(&CStr, &AtomicPtr<c_void>); 5] = [
        (c"memcpy", &memtrace_slot_memcpy),
        (c"memmove", &memtrace_slot_memmove),
        (c"memset", &memtrace_slot_memset),
        (c"memcmp", &memtrace_slot_memcmp),
        (c"strlen", &memtrace_slot_strlen),
    ];
    for (name, slot) in functions {
        let found = original::c_library_function(name);
        if !found.is_null() {
            slot.store(found, Ordering::Relaxed);
        }
    }
}
