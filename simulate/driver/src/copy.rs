//! Copies and sets: the only device work that is really done, and done at once, in whatever order it is asked for.
//!
//! In a capture they are only nodes. The synchronous functions wait for what the default stream has to do.

use crate::state::{code, current_device, machine, now_ns, wait_until};
use simcuda::backing::{PAGE, round_up, zero_pages};
use simcuda::error::Result;
use std::ffi::{c_int, c_uchar, c_uint, c_ushort};

/// Sets larger than this drop whole pages instead of writing zeros, so that they commit nothing.
const DROP_BYTES: u64 = 64 << 10;

/// One unit of work for the stream; gives whether it is to be done now.
fn enqueue(stream: u64) -> Result<bool> {
    machine().launch(stream, current_device(), now_ns())
}

/// # Safety
/// Both ranges can be accessed.
unsafe fn copy(to: u64, from: u64, size: usize, stream: u64) -> c_int {
    code(enqueue(stream).map(|now| {
        if now && size > 0 {
            // SAFETY: the caller's promise; `copy` allows overlap.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) };
        }
    }))
}

/// # Safety
/// Both ranges can be accessed.
unsafe fn copy_and_wait(to: u64, from: u64, size: usize) -> c_int {
    // SAFETY: passed on from the caller.
    let result = unsafe { copy(to, from, size, 0) };
    if let Ok(then) = machine().streams.get(0, current_device()).map(|s| s.busy_until) {
        wait_until(then);
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy(to: u64, from: u64, size: usize) -> c_int {
    // SAFETY: the program names ranges it may access.
    unsafe { copy_and_wait(to, from, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: u64, size: usize) -> c_int {
    // SAFETY: the program names ranges it may access.
    unsafe { copy_and_wait(to, from, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(to: u64, from: u64, size: usize) -> c_int {
    // SAFETY: the program names ranges it may access.
    unsafe { copy_and_wait(to, from, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, size: usize) -> c_int {
    // SAFETY: the program names ranges it may access.
    unsafe { copy_and_wait(to, from, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyAsync(to: u64, from: u64, size: usize, stream: u64) -> c_int {
    // SAFETY: the program names ranges it may access.
    unsafe { copy(to, from, size, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, size: usize, stream: u64) -> c_int {
    // SAFETY: the program names ranges it may access.
    unsafe { copy(to, from, size, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, size: usize, stream: u64) -> c_int {
    // SAFETY: the program names ranges it may access.
    unsafe { copy(to, from, size, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, size: usize, stream: u64) -> c_int {
    // SAFETY: the program names ranges it may access.
    unsafe { copy(to, from, size, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyPeerAsync(
    to: u64,
    _to_context: u64,
    from: u64,
    _from_context: u64,
    size: usize,
    stream: u64,
) -> c_int {
    // SAFETY: the program names ranges it may access.
    unsafe { copy(to, from, size, stream) }
}

/// Fills memory with a repeated value.
///
/// # Safety
/// `count` values can be written at `to`.
unsafe fn fill<T: Copy + PartialEq + Default>(to: u64, value: T, count: usize, stream: u64) -> c_int {
    code(enqueue(stream).map(|now| {
        if !now {
            return;
        }
        let bytes = (count * size_of::<T>()) as u64;
        let (first, last) = (round_up(to, PAGE), (to + bytes) / PAGE * PAGE);
        let dropped = value == T::default()
            && last > first
            && last - first > DROP_BYTES
            && machine().is_droppable(to, bytes)
            && zero_pages(first, last - first);
        let write = |from: u64, until: u64| {
            for at in (from..until).step_by(size_of::<T>()) {
                // SAFETY: inside the range the caller promises; `to` may be unaligned for T.
                unsafe { (at as *mut T).write_unaligned(value) };
            }
        };
        match (dropped, size_of::<T>()) {
            (true, _) => {
                write(to, first);
                write(last, to + bytes);
            }
            // SAFETY: the caller's promise; T is a byte here, whose bit pattern is taken as such.
            (false, 1) => unsafe {
                let byte = std::mem::transmute_copy::<T, u8>(&value);
                std::ptr::write_bytes(to as *mut u8, byte, count);
            },
            (false, _) => write(to, to + bytes),
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8Async(to: u64, value: c_uchar, count: usize, stream: u64) -> c_int {
    // SAFETY: the program names a range it may write.
    unsafe { fill(to, value, count, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD16Async(to: u64, value: c_ushort, count: usize, stream: u64) -> c_int {
    // SAFETY: the program names a range it may write.
    unsafe { fill(to, value, count, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: u64) -> c_int {
    // SAFETY: the program names a range it may write.
    unsafe { fill(to, value, count, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8_v2(to: u64, value: c_uchar, count: usize) -> c_int {
    // SAFETY: the program names a range it may write.
    unsafe { fill(to, value, count, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD16_v2(to: u64, value: c_ushort, count: usize) -> c_int {
    // SAFETY: the program names a range it may write.
    unsafe { fill(to, value, count, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD32_v2(to: u64, value: c_uint, count: usize) -> c_int {
    // SAFETY: the program names a range it may write.
    unsafe { fill(to, value, count, 0) }
}
