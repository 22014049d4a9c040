//! NCCL. Every rank is assumed to have the same data, so a collective copies this rank's own data.

use crate::support::launch;
use simcuda::out::Out;
use std::ffi::{c_char, c_int, c_void};

/// The object to which an `ncclComm_t` points.
#[repr(C)]
pub(crate) struct Communicator {
    size: c_int,
    rank: c_int,
}

/// `ncclUniqueId`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId {
    bytes: [u8; 128],
}

/// `ncclInvalidArgument`
const INVALID: c_int = 4;

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(_status: c_int) -> *const c_char {
    c"simulated NCCL status".as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_communicator: Option<&Communicator>) -> *const c_char {
    c"".as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetVersion(version: Out<c_int>) -> c_int {
    version.put(22809);
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetUniqueId(id: Out<UniqueId>) -> c_int {
    id.put(UniqueId { bytes: [1; 128] });
    0
}

fn make(out: Out<Box<Communicator>>, size: c_int, rank: c_int) -> c_int {
    out.put(Box::new(Communicator { size, rank }));
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRank(out: Out<Box<Communicator>>, size: c_int, _id: UniqueId, rank: c_int) -> c_int {
    make(out, size, rank)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankConfig(
    out: Out<Box<Communicator>>,
    size: c_int,
    _id: UniqueId,
    rank: c_int,
    _config: *const c_void,
) -> c_int {
    make(out, size, rank)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankScalable(
    out: Out<Box<Communicator>>,
    size: c_int,
    rank: c_int,
    _id_count: c_int,
    _ids: *const UniqueId,
    _config: *const c_void,
) -> c_int {
    make(out, size, rank)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommSplit(
    parent: Option<&Communicator>,
    _color: c_int,
    _key: c_int,
    out: Out<Box<Communicator>>,
    _config: *const c_void,
) -> c_int {
    parent.map_or(INVALID, |parent| make(out, parent.size, parent.rank))
}

/// One process uses several devices, and each communicator is a rank of its own.
#[unsafe(no_mangle)]
extern "C" fn ncclCommInitAll(out: Out<Box<Communicator>>, size: c_int, _devices: *const c_int) -> c_int {
    for rank in 0..size {
        make(out.nth(rank as usize), size, rank);
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(_communicator: Option<Box<Communicator>>) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(_communicator: Option<Box<Communicator>>) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommCount(communicator: Option<&Communicator>, count: Out<c_int>) -> c_int {
    count.put(communicator.map_or(0, |c| c.size));
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommUserRank(communicator: Option<&Communicator>, rank: Out<c_int>) -> c_int {
    rank.put(communicator.map_or(0, |c| c.rank));
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommGetAsyncError(_communicator: Option<&Communicator>, error: Out<c_int>) -> c_int {
    error.put(0);
    0
}

/// The size of an `ncclDataType_t` in bytes.
fn element_bytes(kind: c_int) -> usize {
    match kind {
        4 | 5 | 8 => 8,
        2 | 3 | 7 => 4,
        6 | 9 => 2,
        _ => 1,
    }
}

/// Copies `bytes` bytes as work of a stream. Does nothing for null or equal pointers.
///
/// # Safety
/// `from` is null or valid for reads of `bytes` bytes, and `to` is null or valid for writes of as many.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize, stream: u64) -> c_int {
    launch(stream);
    if !from.is_null() && !to.is_null() && !std::ptr::eq(from, to) {
        // SAFETY: the caller guarantees that both buffers are valid for `bytes` bytes. `copy` allows them to overlap.
        unsafe { std::ptr::copy(from, to, bytes) };
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclAllReduce(
    from: *const u8,
    to: *mut u8,
    count: usize,
    kind: c_int,
    _operation: c_int,
    _communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    // SAFETY: by NCCL's contract the program passes buffers of `count` elements that it may access.
    unsafe { copy(from, to, count * element_bytes(kind), stream) }
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn ncclReduce(
    from: *const u8,
    to: *mut u8,
    count: usize,
    kind: c_int,
    _operation: c_int,
    _root: c_int,
    _communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    // SAFETY: by NCCL's contract the program passes buffers of `count` elements that it may access.
    unsafe { copy(from, to, count * element_bytes(kind), stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclBroadcast(
    from: *const u8,
    to: *mut u8,
    count: usize,
    kind: c_int,
    _root: c_int,
    _communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    // SAFETY: by NCCL's contract the program passes buffers of `count` elements that it may access.
    unsafe { copy(from, to, count * element_bytes(kind), stream) }
}

/// Stores this rank's part in every place. DDP compares the shapes of its parameters with this call.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclAllGather(
    from: *const u8,
    to: *mut u8,
    count: usize,
    kind: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    let bytes = count * element_bytes(kind);
    // SAFETY: by NCCL's contract `from` has `bytes` bytes, and `to` has one such part for each rank. The part is copied
    // out first, because `from` may lie in `to`.
    unsafe {
        let own = std::slice::from_raw_parts(from, bytes).to_vec();
        for rank in 0..communicator.map_or(0, |c| c.size as usize) {
            copy(own.as_ptr(), to.add(rank * bytes), bytes, stream);
        }
    }
    0
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
