//! Asks the driver about CUDA graphs: how many nodes a graph has, and how much device memory a call takes.
//!
//! No call returns the memory of an executable graph. It is the difference of the device's free memory around the call,
//! so it includes what other threads and processes took meanwhile.

use std::ffi::c_int;

use super::driver::call_driver;
use super::reading::memory_info_in_capture_mode;
use crate::linker::original::OriginalFunction;
use crate::recording::process::Process;

/// The number of nodes of a graph. 0 if the driver does not answer.
pub(super) fn node_count(graph: u64) -> u64 {
    static GET_NODES: OriginalFunction = OriginalFunction::new();
    if graph == 0 {
        return 0;
    }
    let mut count = 0usize;
    // SAFETY: cuda.h declares `CUresult cuGraphGetNodes(CUgraph, CUgraphNode *, size_t *)`. With a null list it only
    // writes the number of nodes.
    let result = unsafe {
        call_driver(&GET_NODES, c"cuGraphGetNodes", |get: unsafe extern "C" fn(u64, *mut u64, *mut usize) -> c_int| {
            get(graph, std::ptr::null_mut(), &mut count)
        })
    };
    if result == Some(0) { count as u64 } else { 0 }
}

/// The free memory of the current device in bytes. `None` if nothing records this process yet, or if the driver does
/// not answer.
pub(super) fn free_bytes() -> Option<u64> {
    Process::if_started()?;
    // `cuMemGetInfo` is allowed while a stream is captured.
    memory_info_in_capture_mode().map(|info| info.free)
}

/// How many bytes of the device were taken since [`free_bytes`] returned `before`. 0 if that is unknown.
pub(super) fn bytes_taken(before: Option<u64>) -> u64 {
    before.and_then(|before| Some(before.saturating_sub(free_bytes()?))).unwrap_or(0)
}
