//! CUDA arrays and mipmapped arrays.

use crate::driver::Driver;
use crate::state::{give, take};
use simcuda::abi::{Array3dDescriptor, ArrayDescriptor, ChannelDesc, Extent3};
use simcuda::array::{Shape, format_bytes};
use simcuda::error::Error;
use simcuda::ledger::Call;
use simcuda::out::Out;
use std::ffi::{c_int, c_uint};

/// The `CUarray_format` and the number of channels of a runtime descriptor. `None` for an invalid descriptor.
fn format_of(desc: &ChannelDesc) -> Option<(u32, u32)> {
    let channels = desc.bits.iter().take_while(|&&bits| bits > 0).count() as u32;
    let format = match (desc.bits[0], desc.kind) {
        (8, 0) => 0x08,
        (16, 0) => 0x09,
        (32, 0) => 0x0a,
        (8, 1) => 0x01,
        (16, 1) => 0x02,
        (32, 1) => 0x03,
        (16, 2) => 0x10,
        (32, 2) => 0x20,
        _ => return None,
    };
    Some((format, channels))
}

/// The arguments of an array creation.
struct Request {
    api: &'static str,
    out: Out<u64>,
    desc: *const ChannelDesc,
    extent: Extent3,
    levels: u32,
    flags: c_uint,
}

/// Creates an array through the driver and records the call.
///
/// # Safety
/// `request.desc` is null or points to a valid descriptor.
unsafe fn create(request: Request, work: impl FnOnce(&Driver, Out<u64>, &Array3dDescriptor) -> c_int) -> c_int {
    let Request { api, out, desc, extent, levels, flags } = request;
    let call = Call { api, size: Some(0), handle: Some(0), flags: Some(flags.into()), ..Call::default() };
    take(call, |d, call| {
        // SAFETY: the caller guarantees that `desc` is null or points to a valid descriptor.
        let Some((format, channels)) = unsafe { desc.as_ref() }.and_then(format_of).filter(|_| !out.is_null()) else {
            return Error::InvalidValue.code();
        };
        let descriptor = Array3dDescriptor {
            width: extent.width,
            height: extent.height,
            depth: extent.depth,
            format,
            channels,
            flags,
        };
        let mut handle = 0;
        let code = work(d, Out::from(&mut handle), &descriptor);
        if code == 0 {
            let shape = Shape {
                width: extent.width as u64,
                height: extent.height as u64,
                depth: extent.depth as u64,
                element_bytes: format_bytes(format).unwrap_or(0) * u64::from(channels),
                levels,
            };
            call.size = shape.bytes().ok();
            call.handle = Some(handle);
            out.put(handle);
        }
        code
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMallocArray(
    out: Out<u64>,
    desc: *const ChannelDesc,
    width: usize,
    height: usize,
    flags: c_uint,
) -> c_int {
    let extent = Extent3 { width, height, depth: 0 };
    let request = Request { api: "cudaMallocArray", out, desc, extent, levels: 1, flags };
    // SAFETY: by CUDA's contract the caller passes null or a pointer to a structure of that type.
    unsafe {
        create(request, |d, handle, a| {
            if a.flags == 0 {
                let plain =
                    ArrayDescriptor { width: a.width, height: a.height, format: a.format, channels: a.channels };
                (d.array_create)(handle, &plain)
            } else {
                (d.array_3d_create)(handle, a)
            }
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMalloc3DArray(
    out: Out<u64>,
    desc: *const ChannelDesc,
    extent: Extent3,
    flags: c_uint,
) -> c_int {
    let request = Request { api: "cudaMalloc3DArray", out, desc, extent, levels: 1, flags };
    // SAFETY: by CUDA's contract the caller passes null or a pointer to a structure of that type.
    unsafe { create(request, |d, handle, a| (d.array_3d_create)(handle, a)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMallocMipmappedArray(
    out: Out<u64>,
    desc: *const ChannelDesc,
    extent: Extent3,
    levels: c_uint,
    flags: c_uint,
) -> c_int {
    let request = Request { api: "cudaMallocMipmappedArray", out, desc, extent, levels, flags };
    // SAFETY: by CUDA's contract the caller passes null or a pointer to a structure of that type.
    unsafe { create(request, |d, handle, a| (d.mipmapped_array_create)(handle, a, levels)) }
}

#[unsafe(no_mangle)]
extern "C" fn cudaFreeArray(array: u64) -> c_int {
    if array == 0 {
        return 0;
    }
    let call = Call { api: "cudaFreeArray", handle: Some(array), ..Call::default() };
    give(call, |d| (d.array_destroy)(array))
}

#[unsafe(no_mangle)]
extern "C" fn cudaFreeMipmappedArray(array: u64) -> c_int {
    if array == 0 {
        return 0;
    }
    let call = Call { api: "cudaFreeMipmappedArray", handle: Some(array), ..Call::default() };
    give(call, |d| (d.mipmapped_array_destroy)(array))
}
