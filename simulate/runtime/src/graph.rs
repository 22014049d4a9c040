//! Stream capture and graphs.

use crate::driver::version;
use crate::state::call;
use simcuda::out::Out;
use std::ffi::{c_char, c_int, c_uint, c_void};

#[unsafe(no_mangle)]
extern "C" fn cudaStreamBeginCapture(stream: u64, mode: c_int) -> c_int {
    call(|d| (d.stream_begin_capture)(stream, mode))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamEndCapture(stream: u64, graph: Out<u64>) -> c_int {
    call(|d| (d.stream_end_capture)(stream, graph))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamIsCapturing(stream: u64, status: Out<c_int>) -> c_int {
    call(|d| (d.stream_is_capturing)(stream, status))
}

type List = Out<*const c_void>;

#[unsafe(no_mangle)]
extern "C" fn cudaStreamGetCaptureInfo_v2(
    stream: u64,
    status: Out<c_int>,
    id: Out<u64>,
    graph: Out<u64>,
    dependencies: List,
    count: Out<usize>,
) -> c_int {
    call(|d| (d.stream_get_capture_info)(stream, status, id, graph, dependencies, Out::NONE, count))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamGetCaptureInfo_v3(
    stream: u64,
    status: Out<c_int>,
    id: Out<u64>,
    graph: Out<u64>,
    dependencies: List,
    edges: List,
    count: Out<usize>,
) -> c_int {
    call(|d| (d.stream_get_capture_info)(stream, status, id, graph, dependencies, edges, count))
}

/// CUDA 13 has seven arguments. CUDA 12 has three, so the others must not be read there.
#[unsafe(no_mangle)]
extern "C" fn cudaStreamGetCaptureInfo(
    stream: u64,
    status: Out<c_int>,
    id: Out<u64>,
    graph: Out<u64>,
    dependencies: List,
    edges: List,
    count: Out<usize>,
) -> c_int {
    if version() >= 13000 {
        cudaStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, edges, count)
    } else {
        let none = Out::NONE;
        cudaStreamGetCaptureInfo_v3(stream, status, id, none, Out::NONE, Out::NONE, Out::NONE)
    }
}

#[unsafe(no_mangle)]
extern "C" fn cudaThreadExchangeStreamCaptureMode(mode: Out<c_int>) -> c_int {
    call(|d| (d.exchange_capture_mode)(mode))
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphCreate(graph: Out<u64>, flags: c_uint) -> c_int {
    call(|d| (d.graph_create)(graph, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphInstantiateWithFlags(out: Out<u64>, graph: u64, flags: u64) -> c_int {
    call(|d| (d.graph_instantiate)(out, graph, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphInstantiate(out: Out<u64>, graph: u64, flags: u64) -> c_int {
    cudaGraphInstantiateWithFlags(out, graph, flags)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphLaunch(instance: u64, stream: u64) -> c_int {
    call(|d| (d.graph_launch)(instance, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphDestroy(graph: u64) -> c_int {
    call(|d| (d.graph_destroy)(graph))
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphExecDestroy(instance: u64) -> c_int {
    call(|d| (d.graph_exec_destroy)(instance))
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphGetNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) -> c_int {
    call(|d| (d.graph_get_nodes)(graph, nodes, count))
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphDebugDotPrint(_graph: u64, _path: *const c_char, _flags: c_uint) -> c_int {
    0
}
