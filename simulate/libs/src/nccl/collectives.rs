//! Collective operations.

use super::communicator::Communicator;
use super::messages::{ncclGroupEnd, ncclGroupStart, ncclRecv, ncclSend};
use super::{INVALID, content, copy};
use simcuda::reduction::{element_bytes, is_integer, reduce};
use std::ffi::c_int;

/// Exchanges integers, and single elements: a barrier of PyTorch is a reduction of one.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclAllReduce(
    from: *const u8,
    to: *mut u8,
    count: usize,
    kind: c_int,
    operation: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    let bytes = count * element_bytes(kind);
    let is_exchanged = count == 1 || is_integer(kind);
    // SAFETY: by NCCL's contract the program passes buffers of `count` elements that it may access.
    unsafe {
        let exchange = communicator.filter(|_| is_exchanged).and_then(|c| c.exchange(bytes));
        let parts = exchange.and_then(|exchange| exchange.all_gather(&content(from, bytes)));
        let result = parts.and_then(|parts| reduce(&parts, kind, operation)).filter(|result| result.len() == bytes);
        copy(result.as_ref().map_or(from, |result| result.as_ptr()), to, bytes, stream);
    }
    communicator.map_or(0, Communicator::status)
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn ncclReduce(
    from: *const u8,
    to: *mut u8,
    count: usize,
    kind: c_int,
    _operation: c_int,
    root: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    let is_root = communicator.is_none_or(|c| c.rank as c_int == root);
    // SAFETY: by NCCL's contract the program passes buffers of `count` elements that it may access. Only the root has
    // `to`.
    unsafe { copy(from, if is_root { to } else { std::ptr::null_mut() }, count * element_bytes(kind), stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclBroadcast(
    from: *const u8,
    to: *mut u8,
    count: usize,
    kind: c_int,
    root: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    let bytes = count * element_bytes(kind);
    // SAFETY: by NCCL's contract the program passes buffers of `count` elements that it may access.
    unsafe {
        let own = || content(from, bytes);
        let data = communicator.and_then(|c| c.exchange(bytes)?.broadcast(root as u32, &own()));
        copy(data.filter(|data| data.len() == bytes).as_ref().map_or(from, |data| data.as_ptr()), to, bytes, stream);
    }
    communicator.map_or(0, Communicator::status)
}

/// `ncclBroadcast` in place.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclBcast(
    buffer: *mut u8,
    count: usize,
    kind: c_int,
    root: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    // SAFETY: by NCCL's contract the program passes a buffer of `count` elements that it may access.
    unsafe { ncclBroadcast(buffer, buffer, count, kind, root, communicator, stream) }
}

/// Stores the part of each rank in its place.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclAllGather(
    from: *const u8,
    to: *mut u8,
    count: usize,
    kind: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    let Some(communicator) = communicator else { return INVALID };
    let bytes = count * element_bytes(kind);
    // SAFETY: by NCCL's contract `from` has `bytes` bytes, and `to` has one such part for each rank.
    unsafe {
        let parts = communicator.exchange(bytes).and_then(|exchange| exchange.all_gather(&content(from, bytes)));
        for rank in 0..communicator.size as usize {
            let part = parts.as_ref().map(|parts| &parts[rank]).filter(|part| part.len() == bytes);
            // `from` may lie in `to`, as the part of this rank, which a copy does not change.
            copy(part.map_or(from, |part| part.as_ptr()), to.add(rank * bytes), bytes, stream);
        }
    }
    communicator.status()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclReduceScatter(
    from: *const u8,
    to: *mut u8,
    count: usize,
    kind: c_int,
    _operation: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    let bytes = count * element_bytes(kind);
    // SAFETY: by NCCL's contract `from` has one such part for each rank, and `to` has one part.
    unsafe { copy(from.add(communicator.map_or(0, |c| c.rank as usize) * bytes), to, bytes, stream) }
}

/// Each rank sends its n-th part to the n-th rank.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclAlltoAll(
    from: *const u8,
    to: *mut u8,
    count: usize,
    kind: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    let bytes = count * element_bytes(kind);
    ncclGroupStart();
    for rank in 0..communicator.map_or(0, |c| c.size) {
        let at = rank as usize * bytes;
        // SAFETY: by NCCL's contract both buffers have one part of `bytes` bytes for each rank.
        unsafe {
            ncclSend(from.add(at), count, kind, rank as c_int, communicator, stream);
            ncclRecv(to.add(at), count, kind, rank as c_int, communicator, stream);
        }
    }
    ncclGroupEnd()
}
