//! Finds the rank of this process in a distributed job, even if no environment variable has it
//! (`torch.multiprocessing.spawn`).
//!
//! Every backend of `torch.distributed` (NCCL, Gloo, ...) starts with `c10d::Backend::Backend(int rank, int size)`.
//! libtorch_cpu exports that constructor from 2.1 to 2.15 and calls it through its PLT. The first backend is the
//! default group's, whose ranks are those of the job.

use std::ffi::{CStr, c_int, c_void};

use super::libraries::libtorch_cpu;
use crate::linker::original::OriginalFunction;
use crate::recording::guard::Guard;
use crate::recording::process::Process;
use crate::recording::rank;

const BACKEND: &CStr = c"_ZN4c10d7BackendC2Eii";

/// The name of the function that this file replaces, and what replaces it.
pub(super) fn replacement() -> (&'static CStr, *const ()) {
    (BACKEND, backend as *const ())
}

/// `c10d::Backend::Backend(int rank, int size)`, the variant that derived classes call.
#[cfg_attr(not(test), unsafe(export_name = "_ZN4c10d7BackendC2Eii"))]
extern "C-unwind" fn backend(object: *mut c_void, rank: c_int, size: c_int) {
    static ORIGINAL: OriginalFunction = OriginalFunction::new();
    let original = libtorch_cpu(&ORIGINAL, BACKEND);
    if original.is_null() {
        return;
    }
    // SAFETY: `original` is libtorch_cpu's function of this symbol, and the arguments are the caller's.
    unsafe {
        let original: unsafe extern "C-unwind" fn(*mut c_void, c_int, c_int) = std::mem::transmute(original);
        original(object, rank, size);
    }
    // A process without a recording reports its rank when the recording starts.
    if rank::set(rank, size)
        && Process::if_started().is_some()
        && let Some(mut guard) = Guard::enter()
        && let Some(definition) = rank::definition()
    {
        guard.define(&definition);
    }
}
