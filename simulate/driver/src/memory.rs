//! Linear device memory, managed memory, page-locked host memory, and pointer queries.

use crate::state::{Purpose, code, current, current_device, machine, recorded, required_device};
use simcuda::attributes::PITCH_ALIGNMENT;
use simcuda::backing::round_up;
use simcuda::context::primary;
use simcuda::error::{Error, Result};
use simcuda::ledger::Call;
use simcuda::machine::{Machine, Pointee};
use simcuda::memory::{Freed, Kind};
use simcuda::out::Out;
use std::ffi::{c_int, c_uint, c_void};

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> c_int {
    code(required_device().and_then(|d| {
        let mut m = machine();
        let device = m.device(d)?;
        free.put(device.free() as usize);
        total.put(device.total() as usize);
        Ok(())
    }))
}

/// Allocates on the current device and writes the ledger line.
fn allocate(call: Call, out: Out<u64>, work: impl FnOnce(&mut Machine, usize, &mut Call) -> Result<u64>) -> c_int {
    let call = Call { addr: Some(0), device: Some(current_device()), ..call };
    recorded(Purpose::Take, call, |m, call| {
        if out.is_null() {
            return Err(Error::InvalidValue);
        }
        let base = work(m, required_device()?, call)?;
        call.addr = Some(base);
        out.put(base);
        Ok(())
    })
}

/// Frees memory and writes the ledger line with the size and device of the freed allocation.
pub(crate) fn release(
    api: &'static str,
    base: u64,
    stream: Option<u64>,
    work: impl FnOnce(&mut Machine) -> Result<Option<Freed>>,
) -> c_int {
    let call = Call { api, addr: Some(base), stream, ..Call::default() };
    recorded(Purpose::Give, call, |m, call| {
        if let Some(freed) = work(m)? {
            call.size = Some(freed.size);
            call.device = Some(freed.device);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(out: Out<u64>, size: usize) -> c_int {
    let call = Call { api: "cuMemAlloc_v2", size: Some(size as u64), ..Call::default() };
    allocate(call, out, |m, device, _| m.allocate(device, size as u64))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocPitch_v2(
    out: Out<u64>,
    pitch: Out<usize>,
    width: usize,
    height: usize,
    element_size: c_uint,
) -> c_int {
    let call = Call { api: "cuMemAllocPitch_v2", size: Some(0), ..Call::default() };
    let work = |m: &mut Machine, device: usize, call: &mut Call| {
        if pitch.is_null() || !matches!(element_size, 4 | 8 | 16) {
            return Err(Error::InvalidValue);
        }
        let row = round_up(width as u64, PITCH_ALIGNMENT);
        let size = row.checked_mul(height as u64).ok_or(Error::OutOfMemory)?;
        call.pitch = Some(row);
        call.size = Some(size);
        let base = m.allocate(device, size)?;
        pitch.put(row as usize);
        Ok(base)
    };
    allocate(call, out, work)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocManaged(out: Out<u64>, size: usize, flags: c_uint) -> c_int {
    let call = Call { api: "cuMemAllocManaged", size: Some(size as u64), flags: Some(flags.into()), ..Call::default() };
    allocate(call, out, |m, device, _| m.allocate_managed(device, size as u64))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(base: u64) -> c_int {
    release("cuMemFree_v2", base, None, |m| m.free(base))
}

fn host(api: &'static str, out: Out<u64>, size: usize, flags: Option<u64>) -> c_int {
    let call = Call { api, size: Some(size as u64), flags, ..Call::default() };
    allocate(call, out, |m, device, _| m.allocate_host(device, size as u64))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostAlloc(out: Out<u64>, size: usize, flags: c_uint) -> c_int {
    host("cuMemHostAlloc", out, size, Some(flags.into()))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocHost_v2(out: Out<u64>, size: usize) -> c_int {
    host("cuMemAllocHost_v2", out, size, None)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(base: u64) -> c_int {
    release("cuMemFreeHost", base, None, |m| m.free_host(base))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(base: u64, size: usize, flags: c_uint) -> c_int {
    let call = Call {
        api: "cuMemHostRegister_v2",
        addr: Some(base),
        size: Some(size as u64),
        device: Some(current_device()),
        flags: Some(flags.into()),
        ..Call::default()
    };
    recorded(Purpose::Take, call, |m, _| m.register(base, size as u64, required_device()?))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(base: u64) -> c_int {
    release("cuMemHostUnregister", base, None, |m| m.unregister(base).map(Some))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostGetDevicePointer_v2(out: Out<u64>, host: u64, _flags: c_uint) -> c_int {
    out.put(host);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostGetFlags(flags: Out<c_uint>, _host: u64) -> c_int {
    flags.put(0);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, address: u64) -> c_int {
    let found = machine().pointee(address).ok_or(Error::NotFound);
    code(found.map(|p| {
        base.put(p.base);
        size.put(p.size as usize);
    }))
}

/// Writes one pointer attribute.
///
/// By CUDA's contract `out` can hold a value of the attribute's type, which cuda.h defines.
fn put_attribute(out: Out<c_void>, attribute: c_int, address: u64, p: &Pointee) -> Result<()> {
    let host = matches!(p.kind, Kind::Host | Kind::Registered);
    match attribute {
        1 => out.cast().put(current().filter(|c| c.device == p.device).map_or(primary(p.device), |c| c.context)),
        2 => out.cast::<c_uint>().put(if host { 1 } else { 2 }),
        3 => out.cast().put(address),
        4 if host || p.kind == Kind::Managed => out.cast().put(address),
        6 => out.cast::<u8>().put(0),
        7 => out.cast().put(p.base),
        8 => out.cast::<u8>().put(u8::from(p.kind == Kind::Managed)),
        9 => out.cast::<c_int>().put(p.device as c_int),
        11 => out.cast().put(p.base),
        12 => out.cast().put(p.size),
        13 => out.cast::<u8>().put(1),
        17 => out.cast().put(if let Kind::Pooled(pool) = p.kind { pool } else { 0 }),
        4 => return Err(Error::InvalidValue),
        _ => return Err(Error::NotSupported),
    }
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttribute(out: Out<c_void>, attribute: c_int, address: u64) -> c_int {
    let found = machine().pointee(address).ok_or(Error::InvalidValue);
    code(found.and_then(|p| put_attribute(out, attribute, address, &p)))
}

#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: Out<c_int>,
    outs: Out<Out<c_void>>,
    address: u64,
) -> c_int {
    let found = machine().pointee(address);
    for i in 0..count as usize {
        let Some((attribute, out)) = attributes.nth(i).get().zip(outs.nth(i).get()) else {
            return Error::InvalidValue.code();
        };
        match &found {
            Some(p) => drop(put_attribute(out, attribute, address, p)),
            // An unknown pointer gives a zero of the smallest attribute type.
            None => out.cast::<u8>().put(0),
        }
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuPointerSetAttribute(_value: *const c_void, _attribute: c_int, _address: u64) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAdvise(_base: u64, _size: usize, _advice: c_int, _device: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPrefetchAsync(_base: u64, _size: usize, _device: c_int, _stream: u64) -> c_int {
    0
}
