//! Initialization, devices, errors.

use crate::injection;
use crate::state::{code, machine};
use simcuda::attributes::attribute;
use simcuda::error::{Error, Result, describe};
use simcuda::out::Out;
use simcuda::uuid::uuid;
use std::ffi::{CStr, c_char, c_int, c_uint};

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    if machine().devices.is_empty() {
        return Error::NoDevice.code();
    }
    injection::load();
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> c_int {
    version.put(machine().config.driver_version);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> c_int {
    count.put(machine().devices.len() as c_int);
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) -> c_int {
    code(ordinal_of(ordinal).map(|_| device.put(ordinal)))
}

/// The ordinal of a `CUdevice`. Fails with `InvalidDevice` when there is no such device.
pub(crate) fn ordinal_of(device: c_int) -> Result<usize> {
    let count = machine().devices.len();
    usize::try_from(device).ok().filter(|&d| d < count).ok_or(Error::InvalidDevice)
}

/// Copies a C string into a caller's buffer and truncates it to the buffer's length.
///
/// # Safety
/// `buffer` is valid for writes of `length` bytes.
unsafe fn put_text(buffer: *mut c_char, length: c_int, text: &CStr) {
    let Some(room) = usize::try_from(length).ok().and_then(|n| n.checked_sub(1)) else { return };
    let bytes = text.to_bytes();
    let n = bytes.len().min(room);
    // SAFETY: `n` + 1 is at most `length`, and the caller guarantees that `buffer` is valid for that many bytes.
    unsafe {
        buffer.copy_from_nonoverlapping(bytes.as_ptr().cast(), n);
        buffer.add(n).write(0);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> c_int {
    code(ordinal_of(device).map(|_| {
        // SAFETY: by CUDA's contract the buffer has `length` bytes.
        unsafe { put_text(name, length, &machine().config.model.name) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) -> c_int {
    code(ordinal_of(device).map(|d| {
        let total = machine().devices[d].total();
        bytes.put(total as usize)
    }))
}

fn uuid_of(device: c_int) -> Result<[u8; 16]> {
    let d = ordinal_of(device)?;
    Ok(uuid(machine().devices[d].physical))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: c_int) -> c_int {
    code(uuid_of(device).map(|value| uuid.put(value)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) -> c_int {
    code(uuid_of(device).map(|value| uuid.put(value)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) -> c_int {
    code(ordinal_of(device).map(|d| {
        let bus = machine().devices[d].physical + 1;
        let id = format!("0000:{bus:02X}:00.0\0");
        if let Ok(id) = CStr::from_bytes_with_nul(id.as_bytes()) {
            // SAFETY: by CUDA's contract the buffer has `length` bytes.
            unsafe { put_text(text, length, id) };
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetByPCIBusId(device: Out<c_int>, text: *const c_char) -> c_int {
    // SAFETY: by CUDA's contract `text` is a NUL-terminated string.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().to_uppercase();
    let found = machine().devices.iter().position(|d| text == format!("0000:{:02X}:00.0", d.physical + 1));
    code(found.ok_or(Error::InvalidValue).map(|d| device.put(d as c_int)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetAttribute(value: Out<c_int>, attribute_code: c_int, device: c_int) -> c_int {
    code(ordinal_of(device).map(|d| {
        let m = machine();
        let number = attribute(attribute_code, m.devices[d].physical, &m.config.model);
        value.put(number)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: c_int) -> c_int {
    code(ordinal_of(device).map(|_| {
        let sm = machine().config.model.sm;
        major.put((sm / 10) as c_int);
        minor.put((sm % 10) as c_int);
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) -> c_int {
    can.put(c_int::from(device != peer && machine().config.model.has_peer_access()));
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_int, device: c_int, peer: c_int) -> c_int {
    // 2: access supported.
    value.put(c_int::from(attribute == 2 && device != peer && machine().config.model.has_peer_access()));
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(error: c_int, text: Out<*const c_char>) -> c_int {
    text.put(describe(error).1.as_ptr());
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(error: c_int, text: Out<*const c_char>) -> c_int {
    text.put(describe(error).0.as_ptr());
    0
}
