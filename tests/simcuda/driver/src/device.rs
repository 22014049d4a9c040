//! Initialization, devices, errors.

use crate::state::{code, machine, put};
use simcuda::attributes::{NAME, attribute};
use simcuda::error::{Error, Result, describe};
use std::ffi::{CStr, c_char, c_int, c_uint};

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    code(if machine().devices.is_empty() { Err(Error::NoDevice) } else { Ok(()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { put(version, machine().config.driver_version) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { put(count, machine().devices.len() as c_int) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    code(ordinal_of(ordinal).map(|_| {
        // SAFETY: see the crate's contract.
        unsafe { put(device, ordinal) }
    }))
}

/// Checks a `CUdevice`.
pub(crate) fn ordinal_of(device: c_int) -> Result<usize> {
    let count = machine().devices.len();
    usize::try_from(device).ok().filter(|&d| d < count).ok_or(Error::InvalidDevice)
}

/// Copies a C string into a caller's buffer, cut to its length.
///
/// # Safety
/// `buffer` holds `length` bytes.
unsafe fn put_text(buffer: *mut c_char, length: c_int, text: &CStr) {
    let Some(room) = usize::try_from(length).ok().and_then(|n| n.checked_sub(1)) else { return };
    let bytes = text.to_bytes();
    let n = bytes.len().min(room);
    // SAFETY: `n` + 1 bytes fit into the buffer by the caller's promise.
    unsafe {
        buffer.copy_from_nonoverlapping(bytes.as_ptr().cast(), n);
        buffer.add(n).write(0);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> c_int {
    code(ordinal_of(device).map(|_| {
        // SAFETY: see the crate's contract.
        unsafe { put_text(name, length, NAME) }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int {
    code(ordinal_of(device).map(|d| {
        let total = machine().devices[d].total();
        // SAFETY: see the crate's contract.
        unsafe { put(bytes, total as usize) }
    }))
}

fn uuid_of(device: c_int) -> Result<[u8; 16]> {
    let d = ordinal_of(device)?;
    let mut uuid = *b"simcuda\0\0\0\0\0\0\0\0\0";
    uuid[15] = machine().devices[d].physical as u8;
    Ok(uuid)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> c_int {
    // SAFETY: see the crate's contract.
    code(uuid_of(device).map(|value| unsafe { put(uuid, value) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    // SAFETY: see the crate's contract.
    code(uuid_of(device).map(|value| unsafe { put(uuid, value) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) -> c_int {
    code(ordinal_of(device).map(|d| {
        let bus = machine().devices[d].physical + 1;
        let id = format!("0000:{bus:02X}:00.0\0");
        if let Ok(id) = CStr::from_bytes_with_nul(id.as_bytes()) {
            // SAFETY: see the crate's contract.
            unsafe { put_text(text, length, id) };
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetByPCIBusId(device: *mut c_int, text: *const c_char) -> c_int {
    // SAFETY: see the crate's contract.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().to_uppercase();
    let found = machine().devices.iter().position(|d| text == format!("0000:{:02X}:00.0", d.physical + 1));
    code(found.ok_or(Error::InvalidValue).map(|d| {
        // SAFETY: see the crate's contract.
        unsafe { put(device, d as c_int) }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute_code: c_int, device: c_int) -> c_int {
    code(ordinal_of(device).map(|d| {
        let m = machine();
        let number = attribute(attribute_code, m.devices[d].physical, m.config.sm);
        // SAFETY: see the crate's contract.
        unsafe { put(value, number) }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, device: c_int) -> c_int {
    code(ordinal_of(device).map(|_| {
        let sm = machine().config.sm;
        // SAFETY: see the crate's contract.
        unsafe {
            put(major, (sm / 10) as c_int);
            put(minor, (sm % 10) as c_int);
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> c_int {
    // SAFETY: see the crate's contract.
    unsafe { put(can, c_int::from(device != peer)) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_int, device: c_int, peer: c_int) -> c_int {
    // 2: access supported.
    // SAFETY: see the crate's contract.
    unsafe { put(value, c_int::from(attribute == 2 && device != peer)) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> c_int {
    // SAFETY: see the crate's contract; the text lives for ever.
    unsafe { put(text, describe(error).1.as_ptr()) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: c_int, text: *mut *const c_char) -> c_int {
    // SAFETY: see the crate's contract; the text lives for ever.
    unsafe { put(text, describe(error).0.as_ptr()) };
    0
}
