//! Virtual memory management: reservations, physical memory, mappings, and export of physical memory by descriptor.

use crate::state::{Purpose, code, current_device, machine, recorded};
use simcuda::abi::{AccessDesc, AllocationProp};
use simcuda::backing::Extent;
use simcuda::error::{Error, Result};
use simcuda::ledger::Call;
use simcuda::machine::{GRANULARITY, PhysicalRequest};
use simcuda::out::Out;
use simcuda::vmm::Mapping;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};

const DEVICE: i32 = 1;
const FILE_DESCRIPTOR: u32 = 1;
const FABRIC: u32 = 8;

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationGranularity(
    granularity: Out<usize>,
    _props: *const AllocationProp,
    _option: c_int,
) -> c_int {
    granularity.put(GRANULARITY as usize);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressReserve(out: Out<u64>, size: usize, alignment: usize, _hint: u64, flags: u64) -> c_int {
    let device = current_device();
    let call = Call {
        api: "cuMemAddressReserve",
        addr: Some(0),
        size: Some(size as u64),
        device: Some(device),
        flags: Some(flags),
        ..Call::default()
    };
    recorded(Purpose::Take, call, |m, call| {
        if out.is_null() {
            return Err(Error::InvalidValue);
        }
        let base = m.reserve(size as u64, alignment as u64, device)?;
        call.addr = Some(base);
        out.put(base);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(base: u64, size: usize) -> c_int {
    let call = Call {
        api: "cuMemAddressFree",
        addr: Some(base),
        size: Some(size as u64),
        device: Some(current_device()),
        ..Call::default()
    };
    recorded(Purpose::Give, call, |m, _| m.unreserve(base, size as u64))
}

fn words(props: &AllocationProp) -> [u64; 4] {
    let pair = |low: i32, high: i32| u64::from(low as u32) | (u64::from(high as u32) << 32);
    [
        pair(props.kind, props.handle_types as i32),
        pair(props.location.kind, props.location.id),
        props.win32 as u64,
        u64::from_ne_bytes(props.flags),
    ]
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(out: Out<u64>, size: usize, props: *const AllocationProp, flags: u64) -> c_int {
    // SAFETY: by CUDA's contract the caller passes null or a pointer to a structure of that type.
    let props = unsafe { props.as_ref() };
    let on_device = props.filter(|p| p.location.kind == DEVICE).and_then(|p| usize::try_from(p.location.id).ok());
    let call = Call {
        api: "cuMemCreate",
        size: Some(size as u64),
        device: on_device,
        handle: Some(0),
        flags: Some(flags),
        ..Call::default()
    };
    recorded(Purpose::Take, call, |m, call| {
        let props = props.ok_or(Error::InvalidValue)?;
        if out.is_null() {
            return Err(Error::InvalidValue);
        }
        if props.handle_types & FABRIC != 0 {
            return Err(Error::NotPermitted);
        }
        if props.location.kind == DEVICE && on_device.is_none() {
            return Err(Error::InvalidDevice);
        }
        let handle = m.create_physical(PhysicalRequest {
            size: size as u64,
            device: on_device,
            shareable: props.handle_types & FILE_DESCRIPTOR != 0,
            properties: words(props),
        })?;
        call.handle = Some(handle);
        out.put(handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> c_int {
    let call = Call { api: "cuMemRelease", handle: Some(handle), ..Call::default() };
    recorded(Purpose::Give, call, |m, call| {
        let (size, device) = m.release_physical(handle)?;
        call.size = Some(size);
        call.device = Some(device);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRetainAllocationHandle(out: Out<u64>, address: u64) -> c_int {
    let call = Call { api: "cuMemRetainAllocationHandle", handle: Some(0), ..Call::default() };
    recorded(Purpose::Give, call, |m, call| {
        let handle = m.retain_physical(address)?;
        call.handle = Some(handle);
        out.put(handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationPropertiesFromHandle(out: Out<[u64; 4]>, handle: u64) -> c_int {
    let properties = machine().physical(handle).map(|p| p.properties);
    code(properties.map(|words| out.put(words)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(base: u64, size: usize, offset: usize, handle: u64, flags: u64) -> c_int {
    let call = Call {
        api: "cuMemMap",
        addr: Some(base),
        size: Some(size as u64),
        handle: Some(handle),
        offset: Some(offset as u64),
        flags: Some(flags),
        ..Call::default()
    };
    recorded(Purpose::Take, call, |m, call| {
        let device = m.map(base, size as u64, Mapping { handle, offset: offset as u64 })?;
        call.device = Some(device);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(base: u64, size: usize) -> c_int {
    let call = Call { api: "cuMemUnmap", addr: Some(base), size: Some(size as u64), ..Call::default() };
    recorded(Purpose::Give, call, |m, call| {
        call.device = m.unmap(base, size as u64)?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemSetAccess(base: u64, size: usize, access: *const AccessDesc, count: usize) -> c_int {
    // SAFETY: by CUDA's contract `access` points to `count` descriptors, and `i` is less than `count`.
    let accessible = (0..count).any(|i| unsafe { (*access.add(i)).flags } != 0);
    code(machine().set_access(base, size as u64, accessible))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAccess(flags: Out<u64>, _location: *const c_void, _address: u64) -> c_int {
    flags.put(3);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuMemExportToShareableHandle(out: Out<c_int>, handle: u64, kind: c_uint, _flags: u64) -> c_int {
    let duplicate = || -> Result<c_int> {
        let m = machine();
        let physical = m.physical(handle)?;
        let shareable = physical.properties[0] >> 32 & u64::from(FILE_DESCRIPTOR) != 0;
        if kind != FILE_DESCRIPTOR || !shareable {
            return Err(Error::NotSupported);
        }
        Ok(physical.extent.export().map_err(|_| Error::MapFailed)?.into_raw_fd())
    };
    code(duplicate().map(|descriptor| out.put(descriptor)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemImportFromShareableHandle(out: Out<u64>, descriptor: *mut c_void, kind: c_uint) -> c_int {
    let device = current_device();
    let call = Call { api: "cuMemImportFromShareableHandle", device: Some(device), handle: Some(0), ..Call::default() };
    recorded(Purpose::Give, call, |m, call| {
        if kind != FILE_DESCRIPTOR {
            return Err(Error::NotSupported);
        }
        // SAFETY: by CUDA's contract the program passes a descriptor, as a pointer value, that stays open during the
        // call.
        let own = unsafe { BorrowedFd::borrow_raw(descriptor as usize as c_int) }.try_clone_to_owned();
        let extent = own.and_then(Extent::import).map_err(|_| Error::InvalidValue)?;
        let handle = m.import_physical(extent, device);
        call.handle = Some(handle);
        out.put(handle);
        Ok(())
    })
}
