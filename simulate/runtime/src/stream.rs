//! Streams, events and host functions.

use crate::state::{call, call_without_context};
use simcuda::out::Out;
use std::ffi::{c_int, c_uint, c_void};

#[unsafe(no_mangle)]
extern "C" fn cudaStreamCreateWithPriority(out: Out<u64>, flags: c_uint, priority: c_int) -> c_int {
    call(|d| (d.stream_create)(out, flags, priority))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamCreateWithFlags(out: Out<u64>, flags: c_uint) -> c_int {
    call(|d| (d.stream_create)(out, flags, 0))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamCreate(out: Out<u64>) -> c_int {
    call(|d| (d.stream_create)(out, 0, 0))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamDestroy(stream: u64) -> c_int {
    call(|d| (d.stream_destroy)(stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamQuery(stream: u64) -> c_int {
    call(|d| (d.stream_query)(stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamSynchronize(stream: u64) -> c_int {
    call(|d| (d.stream_synchronize)(stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamWaitEvent(stream: u64, event: u64, flags: c_uint) -> c_int {
    call(|d| (d.stream_wait_event)(stream, event, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamGetPriority(stream: u64, priority: Out<c_int>) -> c_int {
    call(|d| (d.stream_get_priority)(stream, priority))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamGetFlags(stream: u64, flags: Out<c_uint>) -> c_int {
    call(|d| (d.stream_get_flags)(stream, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamGetId(stream: u64, id: Out<u64>) -> c_int {
    call(|d| (d.stream_get_id)(stream, id))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamAddCallback(
    stream: u64,
    callback: Option<unsafe extern "C" fn(u64, c_int, *mut c_void)>,
    data: *mut c_void,
    flags: c_uint,
) -> c_int {
    // SAFETY: by CUDA's contract the program passes a function and the data that it accepts.
    call(|d| unsafe { (d.stream_add_callback)(stream, callback, data, flags) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaLaunchHostFunc(
    stream: u64,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> c_int {
    // SAFETY: by CUDA's contract the program passes a function and the data that it accepts.
    call(|d| unsafe { (d.launch_host_func)(stream, function, data) })
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventCreate(out: Out<u64>) -> c_int {
    call(|d| (d.event_create)(out, 0))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventCreateWithFlags(out: Out<u64>, flags: c_uint) -> c_int {
    call(|d| (d.event_create)(out, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventDestroy(event: u64) -> c_int {
    call(|d| (d.event_destroy)(event))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventRecord(event: u64, stream: u64) -> c_int {
    call(|d| (d.event_record)(event, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventRecordWithFlags(event: u64, stream: u64, _flags: c_uint) -> c_int {
    cudaEventRecord(event, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventQuery(event: u64) -> c_int {
    call_without_context(|d| (d.event_query)(event))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventSynchronize(event: u64) -> c_int {
    call_without_context(|d| (d.event_synchronize)(event))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) -> c_int {
    call_without_context(|d| (d.event_elapsed_time)(milliseconds, start, end))
}

/// The name of `cudaEventElapsedTime` in CUDA 12.8.
#[unsafe(no_mangle)]
extern "C" fn cudaEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) -> c_int {
    cudaEventElapsedTime(milliseconds, start, end)
}
