//! Linear memory, host memory, copies and sets.

use crate::state::{call, give, ret, take};
use simcuda::abi::{Extent3, PitchedPtr, PointerAttributes};
use simcuda::error::Error;
use simcuda::ledger::Call;
use simcuda::out::Out;
use std::ffi::{c_int, c_uint, c_void};

fn invalid() -> c_int {
    Error::InvalidValue.code()
}

/// Allocates through a driver function with an out-pointer. Returns null for 0 bytes, as the real runtime does.
fn allocate(
    mut call: Call,
    out: Out<u64>,
    size: usize,
    work: impl FnOnce(&crate::driver::Driver, Out<u64>) -> c_int,
) -> c_int {
    call.addr = Some(0);
    call.size = Some(size as u64);
    take(call, |d, call| {
        if out.is_null() {
            return invalid();
        }
        let mut base = 0;
        let code = if size == 0 { 0 } else { work(d, Out::from(&mut base)) };
        if code == 0 {
            call.addr = Some(base);
            out.put(base);
        }
        code
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaMalloc(out: Out<u64>, size: usize) -> c_int {
    let call = Call { api: "cudaMalloc", ..Call::default() };
    allocate(call, out, size, |d, base| (d.mem_alloc)(base, size))
}

#[unsafe(no_mangle)]
extern "C" fn cudaMallocManaged(out: Out<u64>, size: usize, flags: c_uint) -> c_int {
    let call = Call { api: "cudaMallocManaged", flags: Some(flags.into()), ..Call::default() };
    allocate(call, out, size, |d, base| (d.mem_alloc_managed)(base, size, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cudaMallocHost(out: Out<u64>, size: usize) -> c_int {
    let call = Call { api: "cudaMallocHost", ..Call::default() };
    allocate(call, out, size, |d, base| (d.mem_host_alloc)(base, size, 0))
}

#[unsafe(no_mangle)]
extern "C" fn cudaHostAlloc(out: Out<u64>, size: usize, flags: c_uint) -> c_int {
    let call = Call { api: "cudaHostAlloc", flags: Some(flags.into()), ..Call::default() };
    allocate(call, out, size, |d, base| (d.mem_host_alloc)(base, size, flags))
}

/// Allocates pitched memory and passes its address and pitch to `done`.
fn pitched(api: &'static str, width: usize, rows: usize, done: impl FnOnce(u64, usize)) -> c_int {
    let call = Call { api, addr: Some(0), size: Some(0), ..Call::default() };
    take(call, |d, call| {
        let (mut base, mut pitch) = (0, 0);
        let code = (d.mem_alloc_pitch)(Out::from(&mut base), Out::from(&mut pitch), width, rows, 4);
        if code == 0 {
            call.addr = Some(base);
            call.pitch = Some(pitch as u64);
            call.size = Some((pitch * rows) as u64);
            done(base, pitch);
        }
        code
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaMallocPitch(out: Out<u64>, pitch: Out<usize>, width: usize, height: usize) -> c_int {
    if out.is_null() || pitch.is_null() {
        return ret(invalid());
    }
    pitched("cudaMallocPitch", width, height, |base, row| {
        out.put(base);
        pitch.put(row);
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaMalloc3D(out: Out<PitchedPtr>, extent: Extent3) -> c_int {
    if out.is_null() {
        return ret(invalid());
    }
    let Some(rows) = extent.height.checked_mul(extent.depth) else { return ret(invalid()) };
    pitched("cudaMalloc3D", extent.width, rows, |base, pitch| {
        let value = PitchedPtr { ptr: base as *mut c_void, pitch, xsize: extent.width, ysize: extent.height };
        out.put(value);
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaFree(base: u64) -> c_int {
    give(Call { api: "cudaFree", addr: Some(base), ..Call::default() }, |d| (d.mem_free)(base))
}

#[unsafe(no_mangle)]
extern "C" fn cudaFreeHost(base: u64) -> c_int {
    give(Call { api: "cudaFreeHost", addr: Some(base), ..Call::default() }, |d| (d.mem_free_host)(base))
}

#[unsafe(no_mangle)]
extern "C" fn cudaHostRegister(base: u64, size: usize, flags: c_uint) -> c_int {
    let call = Call {
        api: "cudaHostRegister",
        addr: Some(base),
        size: Some(size as u64),
        flags: Some(flags.into()),
        ..Call::default()
    };
    take(call, |d, _| (d.mem_host_register)(base, size, flags))
}

#[unsafe(no_mangle)]
extern "C" fn cudaHostUnregister(base: u64) -> c_int {
    let call = Call { api: "cudaHostUnregister", addr: Some(base), ..Call::default() };
    give(call, |d| (d.mem_host_unregister)(base))
}

#[unsafe(no_mangle)]
extern "C" fn cudaHostGetDevicePointer(out: Out<u64>, host: u64, _flags: c_uint) -> c_int {
    out.put(host);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaHostGetFlags(flags: Out<c_uint>, _host: u64) -> c_int {
    flags.put(0);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemGetInfo(free: Out<usize>, total: Out<usize>) -> c_int {
    call(|d| (d.mem_get_info)(free, total))
}

#[unsafe(no_mangle)]
extern "C" fn cudaPointerGetAttributes(out: Out<PointerAttributes>, address: u64) -> c_int {
    const MEMORY_TYPE: c_int = 2;
    const IS_MANAGED: c_int = 8;
    const DEVICE_ORDINAL: c_int = 9;
    call(|d| {
        let (mut kind, mut managed, mut device) = (0 as c_uint, 0u8, 0 as c_int);
        let known = (d.pointer_get_attribute)((&raw mut kind).cast(), MEMORY_TYPE, address) == 0
            && (d.pointer_get_attribute)((&raw mut managed).cast(), IS_MANAGED, address) == 0
            && (d.pointer_get_attribute)((&raw mut device).cast(), DEVICE_ORDINAL, address) == 0;
        let attributes = match (known, managed != 0, kind) {
            (false, ..) => PointerAttributes { device: -2, ..PointerAttributes::default() },
            (true, false, 1) => PointerAttributes { kind: 1, device, device_pointer: address, host_pointer: address },
            (true, false, _) => PointerAttributes { kind: 2, device, device_pointer: address, host_pointer: 0 },
            (true, true, _) => PointerAttributes { kind: 3, device, device_pointer: address, host_pointer: address },
        };
        out.put(attributes);
        0
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpy(to: u64, from: u64, size: usize, _kind: c_int) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    call(|d| unsafe { (d.memcpy)(to, from, size) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpyAsync(to: u64, from: u64, size: usize, _kind: c_int, stream: u64) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    call(|d| unsafe { (d.memcpy_async)(to, from, size, stream) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpyPeerAsync(
    to: u64,
    _to_device: c_int,
    from: u64,
    _from_device: c_int,
    size: usize,
    stream: u64,
) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    call(|d| unsafe { (d.memcpy_async)(to, from, size, stream) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpyPeer(to: u64, _to_device: c_int, from: u64, _from_device: c_int, size: usize) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    call(|d| unsafe { (d.memcpy)(to, from, size) })
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn cudaMemcpy2DAsync(
    to: u64,
    to_pitch: usize,
    from: u64,
    from_pitch: usize,
    width: usize,
    height: usize,
    _kind: c_int,
    stream: u64,
) -> c_int {
    call(|d| {
        (0..height as u64)
            .map(|row| {
                let (to, from) = (to + row * to_pitch as u64, from + row * from_pitch as u64);
                // SAFETY: by CUDA's contract the program passes rows of `width` bytes that it may access.
                unsafe { (d.memcpy_async)(to, from, width, stream) }
            })
            .find(|&code| code != 0)
            .unwrap_or(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpy2D(
    to: u64,
    to_pitch: usize,
    from: u64,
    from_pitch: usize,
    width: usize,
    height: usize,
    kind: c_int,
) -> c_int {
    // SAFETY: by CUDA's contract the program passes rows of `width` bytes that it may access.
    unsafe { cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemsetAsync(to: u64, value: c_int, size: usize, stream: u64) -> c_int {
    // SAFETY: by CUDA's contract the program passes a range of `size` bytes that it may write.
    call(|d| unsafe { (d.memset_async)(to, value as u8, size, stream) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemset(to: u64, value: c_int, size: usize) -> c_int {
    // SAFETY: by CUDA's contract the program passes a range of `size` bytes that it may write.
    unsafe { cudaMemsetAsync(to, value, size, 0) }
}
