//! Stream capture and graphs.

use crate::driver::version;
use crate::state::call;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

#[unsafe(no_mangle)]
extern "C" fn cudaStreamBeginCapture(stream: u64, mode: c_int) -> c_int {
    // SAFETY: the driver checks the handle.
    call(|d| unsafe { (d.stream_begin_capture)(stream, mode) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamEndCapture(stream: u64, graph: *mut u64) -> c_int {
    // SAFETY: see the crate's contract.
    call(|d| unsafe { (d.stream_end_capture)(stream, graph) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamIsCapturing(stream: u64, status: *mut c_int) -> c_int {
    // SAFETY: see the crate's contract.
    call(|d| unsafe { (d.stream_is_capturing)(stream, status) })
}

type List = *mut *const c_void;

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamGetCaptureInfo_v2(
    stream: u64,
    status: *mut c_int,
    id: *mut u64,
    graph: *mut u64,
    dependencies: List,
    count: *mut usize,
) -> c_int {
    // SAFETY: see the crate's contract.
    call(|d| unsafe { (d.stream_get_capture_info)(stream, status, id, graph, dependencies, ptr::null_mut(), count) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamGetCaptureInfo_v3(
    stream: u64,
    status: *mut c_int,
    id: *mut u64,
    graph: *mut u64,
    dependencies: List,
    edges: List,
    count: *mut usize,
) -> c_int {
    // SAFETY: see the crate's contract.
    call(|d| unsafe { (d.stream_get_capture_info)(stream, status, id, graph, dependencies, edges, count) })
}

/// Seven arguments in CUDA 13, three in CUDA 12: there the others are not looked at.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamGetCaptureInfo(
    stream: u64,
    status: *mut c_int,
    id: *mut u64,
    graph: *mut u64,
    dependencies: List,
    edges: List,
    count: *mut usize,
) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe {
        if version() >= 13000 {
            cudaStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, edges, count)
        } else {
            let none = ptr::null_mut();
            cudaStreamGetCaptureInfo_v3(stream, status, id, none, ptr::null_mut(), ptr::null_mut(), ptr::null_mut())
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    // SAFETY: see the crate's contract.
    call(|d| unsafe { (d.exchange_capture_mode)(mode) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphCreate(graph: *mut u64, flags: c_uint) -> c_int {
    // SAFETY: see the crate's contract.
    call(|d| unsafe { (d.graph_create)(graph, flags) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphInstantiateWithFlags(out: *mut u64, graph: u64, flags: u64) -> c_int {
    // SAFETY: see the crate's contract.
    call(|d| unsafe { (d.graph_instantiate)(out, graph, flags) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphInstantiate(out: *mut u64, graph: u64, flags: u64) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { cudaGraphInstantiateWithFlags(out, graph, flags) }
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphLaunch(instance: u64, stream: u64) -> c_int {
    // SAFETY: the driver checks the handles.
    call(|d| unsafe { (d.graph_launch)(instance, stream) })
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphDestroy(graph: u64) -> c_int {
    // SAFETY: the driver checks the handle.
    call(|d| unsafe { (d.graph_destroy)(graph) })
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphExecDestroy(instance: u64) -> c_int {
    // SAFETY: the driver checks the handle.
    call(|d| unsafe { (d.graph_exec_destroy)(instance) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphGetNodes(graph: u64, nodes: *mut u64, count: *mut usize) -> c_int {
    // SAFETY: see the crate's contract.
    call(|d| unsafe { (d.graph_get_nodes)(graph, nodes, count) })
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphDebugDotPrint(_graph: u64, _path: *const c_char, _flags: c_uint) -> c_int {
    0
}
