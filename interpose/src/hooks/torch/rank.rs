//! Which rank of a distributed job this process is: known to PyTorch even where no environment variable says so (ranks started by
//! `torch.multiprocessing.spawn`).
//!
//! Every backend of `torch.distributed` (NCCL, Gloo, ...) begins with `c10d::Backend::Backend(int rank, int size)`, which libtorch_cpu
//! exports by that name in every version from 2.1 to 2.15 and calls through its PLT. The first one made is the default group's, whose
//! ranks are the job's.

use std::ffi::{CStr, c_int, c_void};

use super::exported_by;
use crate::guard::Guard;
use crate::process::Process;
use crate::rank;
use crate::real::Original;

const BACKEND: &CStr = c"_ZN4c10d7BackendC2Eii";

/// `c10d::Backend::Backend(int rank, int size)`, as the classes derived from it call it.
#[cfg_attr(not(test), unsafe(export_name = "_ZN4c10d7BackendC2Eii"))]
extern "C-unwind" fn backend(object: *mut c_void, rank: c_int, size: c_int) {
    static ORIGINAL: Original = Original::new();
    let original = ORIGINAL.get(|| exported_by(b"libtorch_cpu.so", BACKEND));
    if original.is_null() {
        return;
    }
    // SAFETY: the original of this symbol, with the arguments as they came.
    unsafe {
        let original: unsafe extern "C-unwind" fn(*mut c_void, c_int, c_int) = std::mem::transmute(original);
        original(object, rank, size);
    }
    // Before its first event a process tells when that comes.
    if rank::set(rank, size)
        && Process::if_started().is_some()
        && let Some(mut guard) = Guard::enter()
        && let Some(definition) = rank::definition()
    {
        guard.define(&definition);
    }
}
