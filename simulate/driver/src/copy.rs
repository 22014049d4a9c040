//! Copies and sets: the only device work that is really done. It is done at once, in the order of the calls.
//!
//! In a capture, copies and sets are only nodes. The synchronous functions wait until the default stream is no longer
//! busy.

use crate::state::{code, current_device, machine, now_ns, wait_until};
use simcuda::backing::{PAGE, round_up, zero_pages};
use simcuda::error::Result;
use std::ffi::{c_int, c_uchar, c_uint, c_ushort};

/// Zeros of more than this many bytes are stored by dropping whole pages instead of writing, so that they commit no
/// memory. Copies of more look for such zeros.
const DROP_BYTES: u64 = 64 << 10;

/// Adds one unit of work to the stream. Returns whether the caller must do the work now.
fn enqueue(stream: u64) -> Result<bool> {
    machine().launch(stream, current_device(), now_ns())
}

/// Copies `size` bytes now. Device memory to which nothing was written is not read, because that would commit it.
///
/// # Safety
/// Both ranges are valid for access of `size` bytes.
unsafe fn copy_now(to: u64, from: u64, size: usize) {
    let bytes = size as u64;
    let is_apart = to.abs_diff(from) >= bytes;
    let written = if bytes > DROP_BYTES && is_apart { machine().written(from, bytes) } else { None };
    let Some(written) = written else {
        // SAFETY: the caller guarantees that both ranges are valid for `size` bytes. `copy` allows them to overlap.
        return unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) };
    };
    let mut at = from;
    for part in written {
        // SAFETY: the parts are ordered and inside the range that is valid for `size` bytes, and so is what lies
        // between them. The two ranges do not overlap.
        unsafe {
            clear(to + (at - from), part.start - at);
            let length = (part.end - part.start) as usize;
            std::ptr::copy_nonoverlapping(part.start as *const u8, (to + (part.start - from)) as *mut u8, length);
        }
        at = part.end;
    }
    // SAFETY: this is the end of the range.
    unsafe { clear(to + (at - from), from + bytes - at) };
}

/// Writes zeros. Whole pages of device memory are dropped, so that they commit no memory.
///
/// # Safety
/// The range is valid for writes.
unsafe fn clear(to: u64, bytes: u64) {
    let (first, last) = (round_up(to, PAGE), (to + bytes) / PAGE * PAGE);
    let is_dropped = bytes > DROP_BYTES && machine().is_droppable(to, bytes) && zero_pages(first, last - first);
    let kept = if is_dropped { [to..first, last..to + bytes] } else { [to..to + bytes, 0..0] };
    for part in kept {
        // SAFETY: the part is inside the range that the caller guarantees to be valid for writes.
        unsafe { std::ptr::write_bytes(part.start as *mut u8, 0, (part.end - part.start) as usize) };
    }
}

/// Copies `size` bytes as work of a stream.
///
/// # Safety
/// Both ranges are valid for access of `size` bytes.
pub(crate) unsafe fn copy(to: u64, from: u64, size: usize, stream: u64) -> c_int {
    code(enqueue(stream).map(|now| {
        if now && size > 0 {
            // SAFETY: the caller guarantees that both ranges are valid for `size` bytes.
            unsafe { copy_now(to, from, size) };
        }
    }))
}

/// Copies `size` bytes and waits for the default stream.
///
/// # Safety
/// Both ranges are valid for access of `size` bytes.
unsafe fn copy_and_wait(to: u64, from: u64, size: usize) -> c_int {
    // SAFETY: the caller guarantees that both ranges are valid for `size` bytes.
    let result = unsafe { copy(to, from, size, 0) };
    if let Ok(then) = machine().streams.get(0, current_device()).map(|s| s.busy_until) {
        wait_until(then);
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy(to: u64, from: u64, size: usize) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    unsafe { copy_and_wait(to, from, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: u64, size: usize) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    unsafe { copy_and_wait(to, from, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(to: u64, from: u64, size: usize) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    unsafe { copy_and_wait(to, from, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, size: usize) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    unsafe { copy_and_wait(to, from, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyAsync(to: u64, from: u64, size: usize, stream: u64) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    unsafe { copy(to, from, size, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, size: usize, stream: u64) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    unsafe { copy(to, from, size, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, size: usize, stream: u64) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    unsafe { copy(to, from, size, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, size: usize, stream: u64) -> c_int {
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
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
    // SAFETY: by CUDA's contract the program passes ranges of `size` bytes that it may access.
    unsafe { copy(to, from, size, stream) }
}

/// Fills memory with a repeated value, as work of a stream.
///
/// # Safety
/// `to` is valid for writes of `count` values.
unsafe fn fill<T: Copy + PartialEq + Default>(to: u64, value: T, count: usize, stream: u64) -> c_int {
    code(enqueue(stream).map(|now| {
        if !now {
            return;
        }
        let bytes = count * size_of::<T>();
        if value == T::default() {
            // SAFETY: the caller guarantees that `to` is valid for `count` values.
            return unsafe { clear(to, bytes as u64) };
        }
        if size_of::<T>() == 1 {
            // SAFETY: the caller guarantees that `to` is valid for `count` values. `T` has the size of a byte here, so
            // its bit pattern is one.
            return unsafe {
                let byte = std::mem::transmute_copy::<T, u8>(&value);
                std::ptr::write_bytes(to as *mut u8, byte, count);
            };
        }
        for at in (to..to + bytes as u64).step_by(size_of::<T>()) {
            // SAFETY: `at` lies inside the range that the caller guarantees to be valid for writes. The write allows an
            // unaligned address.
            unsafe { (at as *mut T).write_unaligned(value) };
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8Async(to: u64, value: c_uchar, count: usize, stream: u64) -> c_int {
    // SAFETY: by CUDA's contract the program passes a range of `count` values that it may write.
    unsafe { fill(to, value, count, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD16Async(to: u64, value: c_ushort, count: usize, stream: u64) -> c_int {
    // SAFETY: by CUDA's contract the program passes a range of `count` values that it may write.
    unsafe { fill(to, value, count, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: u64) -> c_int {
    // SAFETY: by CUDA's contract the program passes a range of `count` values that it may write.
    unsafe { fill(to, value, count, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8_v2(to: u64, value: c_uchar, count: usize) -> c_int {
    // SAFETY: by CUDA's contract the program passes a range of `count` values that it may write.
    unsafe { fill(to, value, count, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD16_v2(to: u64, value: c_ushort, count: usize) -> c_int {
    // SAFETY: by CUDA's contract the program passes a range of `count` values that it may write.
    unsafe { fill(to, value, count, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD32_v2(to: u64, value: c_uint, count: usize) -> c_int {
    // SAFETY: by CUDA's contract the program passes a range of `count` values that it may write.
    unsafe { fill(to, value, count, 0) }
}
