//! Streams, events and host functions on the virtual timeline.

use crate::state::{code, current_device, machine, now_ns, synchronize};
use simcuda::error::Error;
use simcuda::out::Out;
use std::ffi::{c_int, c_uint, c_void};

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreateWithPriority(out: Out<u64>, flags: c_uint, priority: c_int) -> c_int {
    let device = current_device();
    code(machine().create_stream(device, flags, priority).map(|handle| out.put(handle)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(out: Out<u64>, flags: c_uint) -> c_int {
    cuStreamCreateWithPriority(out, flags, 0)
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: u64) -> c_int {
    code(machine().destroy_stream(stream))
}

fn busy_until(stream: u64) -> Result<u64, Error> {
    machine().streams.get(stream, current_device()).map(|s| s.busy_until)
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: u64) -> c_int {
    code(busy_until(stream).and_then(|then| if then > now_ns() { Err(Error::NotReady) } else { Ok(()) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: u64) -> c_int {
    code(busy_until(stream).map(synchronize))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetPriority(stream: u64, priority: Out<c_int>) -> c_int {
    let found = machine().streams.get(stream, current_device()).map(|s| s.priority);
    code(found.map(|value| priority.put(value)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetFlags(stream: u64, flags: Out<c_uint>) -> c_int {
    let found = machine().streams.get(stream, current_device()).map(|s| s.flags);
    code(found.map(|value| flags.put(value)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetId(stream: u64, id: Out<u64>) -> c_int {
    let found = machine().streams.get(stream, current_device()).map(|s| s.id);
    code(found.map(|value| id.put(value)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetDevice(stream: u64, device: Out<c_int>) -> c_int {
    let found = machine().streams.get(stream, current_device()).map(|s| s.device);
    code(found.map(|value| device.put(value as c_int)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetCtx(stream: u64, context: Out<u64>) -> c_int {
    let found = machine().streams.get(stream, current_device()).map(|s| s.device);
    code(found.map(|device| context.put(simcuda::context::primary(device))))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> c_int {
    let m = &mut *machine();
    code(m.streams.wait(stream, event, current_device(), |id| m.graphs.capture(id).is_some()))
}

/// Host functions run at once. In a capture they are only nodes.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchHostFunc(
    stream: u64,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> c_int {
    let now = machine().launch(stream, current_device(), now_ns());
    code(now.map(|now| {
        if let Some(function) = function.filter(|_| now) {
            // SAFETY: by CUDA's contract the program passes a function and the data that it accepts.
            unsafe { function(data) };
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamAddCallback(
    stream: u64,
    callback: Option<unsafe extern "C" fn(u64, c_int, *mut c_void)>,
    data: *mut c_void,
    _flags: c_uint,
) -> c_int {
    if let Some(callback) = callback {
        // SAFETY: by CUDA's contract the program passes a function and the data that it accepts.
        unsafe { callback(stream, 0, data) };
    }
    0
}

/// Writes a value to device memory as work of a stream.
///
/// # Safety
/// `address` is valid for writes of a `T`. It may be unaligned.
unsafe fn write_value<T>(stream: u64, address: u64, value: T) -> c_int {
    let now = machine().launch(stream, current_device(), now_ns());
    code(now.map(|now| {
        if now {
            // SAFETY: the caller guarantees that `address` is valid for writes of a `T`. The write may be unaligned.
            unsafe { (address as *mut T).write_unaligned(value) };
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamWriteValue32_v2(stream: u64, address: u64, value: u32, _flags: c_uint) -> c_int {
    // SAFETY: by CUDA's contract the program passes the address of device memory in which the value fits.
    unsafe { write_value(stream, address, value) }
}

/// PyTorch before 2.8 looks the function up under this old name.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamWriteValue32(stream: u64, address: u64, value: u32, _flags: c_uint) -> c_int {
    // SAFETY: by CUDA's contract the program passes the address of device memory in which the value fits.
    unsafe { write_value(stream, address, value) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamWriteValue64_v2(stream: u64, address: u64, value: u64, _flags: c_uint) -> c_int {
    // SAFETY: by CUDA's contract the program passes the address of device memory in which the value fits.
    unsafe { write_value(stream, address, value) }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitValue32_v2(_stream: u64, _address: u64, _value: u32, _flags: c_uint) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuEventCreate(out: Out<u64>, _flags: c_uint) -> c_int {
    let m = &mut *machine();
    let handle = m.streams.create_event(&mut m.handles);
    out.put(handle);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: u64) -> c_int {
    code(machine().streams.destroy_event(event))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, stream: u64) -> c_int {
    code(machine().streams.record(event, stream, current_device(), now_ns()))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecordWithFlags(event: u64, stream: u64, _flags: c_uint) -> c_int {
    cuEventRecord(event, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: u64) -> c_int {
    let event = machine().streams.event(event);
    code(event.and_then(|e| match e.ready_at {
        Some(then) if then > now_ns() => Err(Error::NotReady),
        _ => Ok(()),
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: u64) -> c_int {
    let event = machine().streams.event(event);
    code(event.map(|e| synchronize(e.ready_at.unwrap_or(0))))
}

/// By how much elapsed time is longer than the virtual time where no duration of kernels is set. Autotuners repeat a
/// kernel until a time has passed: a kernel of a few microseconds 100,000 times, for each of many configurations.
const UNKNOWN_DURATION: f64 = 1000.0;

fn elapsed(milliseconds: Out<f32>, start: u64, end: u64) -> c_int {
    let m = machine();
    let scale = if m.config.kernel_ns == 0 { UNKNOWN_DURATION } else { 1.0 };
    let both = m.streams.event(start).and_then(|a| Ok((a, m.streams.event(end)?)));
    code(both.and_then(|(a, b)| {
        let (a, b) = a.ready_at.zip(b.ready_at).ok_or(Error::InvalidHandle)?;
        milliseconds.put(((b as f64 - a as f64) * scale / 1e6) as f32);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) -> c_int {
    elapsed(milliseconds, start, end)
}

#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) -> c_int {
    elapsed(milliseconds, start, end)
}
