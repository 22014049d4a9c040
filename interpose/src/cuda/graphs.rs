//! Asks the driver about CUDA graphs: how many nodes a graph has, and how much device memory a call takes.
//!
//! No call returns the memory of an executable graph. It is the difference of the device's free memory around the call,
//! so it includes what other threads and processes took meanwhile.

use std::ffi::c_int;

use super::driver::call_driver;
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
    static GET_INFO: OriginalFunction = OriginalFunction::new();
    Process::if_started()?;
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: cuda.h declares `CUresult cuMemGetInfo_v2(size_t *, size_t *)`, and both are writable. It changes nothing,
    // and it is allowed while a stream is captured.
    let result = unsafe {
        call_driver(&GET_INFO, c"cuMemGetInfo_v2", |get: unsafe extern "C" fn(*mut usize, *mut usize) -> c_int| {
            get(&mut free, &mut total)
        })
    };
    (result == Some(0)).then_some(free as u64)
}

/// How many bytes of the device were taken since [`free_bytes`] returned `before`. 0 if that is unknown.
pub(super) fn bytes_taken(before: Option<u64>) -> u64 {
    before.and_then(|before| Some(before.saturating_sub(free_bytes()?))).unwrap_or(0)
}
