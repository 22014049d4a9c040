//! CUDA arrays and mipmapped arrays.

use crate::state::{Purpose, current_device, recorded, required_device};
use simcuda::abi::{Array3dDescriptor, ArrayDescriptor};
use simcuda::array::{Shape, format_bytes};
use simcuda::error::{Error, Result};
use simcuda::ledger::Call;
use simcuda::out::Out;
use std::ffi::{c_int, c_uint};

fn create(api: &'static str, out: Out<u64>, flags: Option<u64>, shape: Result<Shape>) -> c_int {
    let call = Call { api, size: Some(0), device: Some(current_device()), handle: Some(0), flags, ..Call::default() };
    recorded(Purpose::Take, call, |m, call| {
        if out.is_null() {
            return Err(Error::InvalidValue);
        }
        let shape = shape?;
        call.size = Some(shape.bytes()?);
        let (handle, _) = m.create_array(required_device()?, shape)?;
        call.handle = Some(handle);
        out.put(handle);
        Ok(())
    })
}

fn destroy(api: &'static str, handle: u64) -> c_int {
    let call = Call { api, handle: Some(handle), ..Call::default() };
    recorded(Purpose::Give, call, |m, call| {
        let (device, bytes) = m.destroy_array(handle)?;
        call.device = Some(device);
        call.size = Some(bytes);
        Ok(())
    })
}

fn shape_3d(d: &Array3dDescriptor, levels: u32) -> Result<Shape> {
    Ok(Shape {
        width: d.width as u64,
        height: d.height as u64,
        depth: d.depth as u64,
        element_bytes: format_bytes(d.format)? * u64::from(d.channels),
        levels,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuArrayCreate_v2(out: Out<u64>, descriptor: *const ArrayDescriptor) -> c_int {
    // SAFETY: by CUDA's contract the caller passes null or a pointer to a structure of that type.
    let shape = unsafe { descriptor.as_ref() }.ok_or(Error::InvalidValue).and_then(|d| {
        let element_bytes = format_bytes(d.format)? * u64::from(d.channels);
        Ok(Shape { width: d.width as u64, height: d.height as u64, depth: 0, element_bytes, levels: 1 })
    });
    create("cuArrayCreate_v2", out, None, shape)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuArray3DCreate_v2(out: Out<u64>, descriptor: *const Array3dDescriptor) -> c_int {
    // SAFETY: by CUDA's contract the caller passes null or a pointer to a structure of that type.
    let descriptor = unsafe { descriptor.as_ref() };
    let shape = descriptor.ok_or(Error::InvalidValue).and_then(|d| shape_3d(d, 1));
    create("cuArray3DCreate_v2", out, descriptor.map(|d| d.flags.into()), shape)
}

#[unsafe(no_mangle)]
extern "C" fn cuArrayDestroy(array: u64) -> c_int {
    destroy("cuArrayDestroy", array)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMipmappedArrayCreate(
    out: Out<u64>,
    descriptor: *const Array3dDescriptor,
    levels: c_uint,
) -> c_int {
    // SAFETY: by CUDA's contract the caller passes null or a pointer to a structure of that type.
    let descriptor = unsafe { descriptor.as_ref() };
    let shape = descriptor.ok_or(Error::InvalidValue).and_then(|d| shape_3d(d, levels));
    create("cuMipmappedArrayCreate", out, descriptor.map(|d| d.flags.into()), shape)
}

#[unsafe(no_mangle)]
extern "C" fn cuMipmappedArrayDestroy(array: u64) -> c_int {
    destroy("cuMipmappedArrayDestroy", array)
}
