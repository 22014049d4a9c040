//! Recognizes the workspaces of cuBLAS: the blocks that PyTorch's functions for them allocate (aten/src/ATen/cuda/
//! CublasHandlePool.cpp). A tensor of the same size is none, so the native caller decides.
//!
//! The functions allocate through a few others, so their return address is near the top of the stack. It is searched
//! for only in allocations of the sizes that workspaces have.

use std::ffi::CStr;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use memtrace_trace::definition::{NoticeStatus, WORKSPACES_TOPIC};
use memtrace_trace::event::Flags;

use crate::linker::shared_objects::exported_function;
use crate::recording::guard::Guard;

/// PyTorch's defaults: cuBLASLt, cuBLASLt of some releases, cuBLAS before Hopper and from Hopper on. The last is also
/// that of `CUBLAS_WORKSPACE_CONFIG=:4096:8`, which deterministic programs use.
const SIZES: [u64; 4] = [1 << 20, 4 << 20, (4096 * 2 + 16 * 8) << 10, 32 << 20];

/// All of them are multiples of it. This test excludes most allocations, in fewer instructions than the list.
const GRANULE: u64 = 128 << 10;

/// The functions that allocate workspaces, by release: `cublasHandle_t at::cuda::getCurrentCUDABlasHandle(bool setup)`
/// (without the argument before 2.12), `getCurrentCUDABlasHandleWithWorkspace()`, `getCUDABlasLtWorkspace()` and
/// `getCUDABlasLtWorkspace(size_t)`.
const FUNCTIONS: [&CStr; 5] = [
    c"_ZN2at4cuda24getCurrentCUDABlasHandleEv",
    c"_ZN2at4cuda24getCurrentCUDABlasHandleEb",
    c"_ZN2at4cuda37getCurrentCUDABlasHandleWithWorkspaceEv",
    c"_ZN2at4cuda22getCUDABlasLtWorkspaceEv",
    c"_ZN2at4cuda22getCUDABlasLtWorkspaceEm",
];
/// The functions of one source file are beside each other. Greater distances mean a build that memtrace does not know.
const MAX_CODE: usize = 64 << 10;

/// The addresses of the functions: first and end. (0, 0) before they are searched for, (1, 1) if they are unknown. Two
/// threads that search at once find the same.
static CODE: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
static IS_REPORTED: AtomicU32 = AtomicU32::new(0);

/// Starts a recording.
pub(super) fn start() {
    IS_REPORTED.store(0, Ordering::Relaxed);
}

/// [`Flags::CUBLAS_WORKSPACE`] if the block of `size` bytes, which is being allocated, is a workspace, otherwise no
/// flag.
#[inline(always)]
pub(super) fn flag(guard: &mut Guard, size: u64) -> Flags {
    if size.is_multiple_of(GRANULE) { flag_of_large(guard, size) } else { Flags::default() }
}

#[cold]
#[inline(never)]
fn flag_of_large(guard: &mut Guard, size: u64) -> Flags {
    if !SIZES.contains(&size) {
        return Flags::default();
    }
    let [first, end] = &CODE;
    if first.load(Ordering::Acquire) == 0 {
        let found = find_code().unwrap_or(1..1);
        end.store(found.end, Ordering::Relaxed);
        first.store(found.start, Ordering::Release);
    }
    let code = first.load(Ordering::Acquire)..end.load(Ordering::Relaxed);
    if code.is_empty() {
        return Flags::default();
    }
    if IS_REPORTED.swap(1, Ordering::Relaxed) == 0 {
        guard.notice(WORKSPACES_TOPIC, NoticeStatus::Works, "functions found");
    }
    if guard.is_called_from(&code) { Flags::CUBLAS_WORKSPACE } else { Flags::default() }
}

/// The smallest range that contains all functions.
fn find_code() -> Option<Range<usize>> {
    let found = FUNCTIONS.into_iter().filter_map(|name| exported_function(b"libtorch_cuda.so", name));
    let all = found.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))?;
    Some(all).filter(|all| all.len() <= MAX_CODE)
}
