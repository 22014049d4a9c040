//! NCCL. Ranks exchange small data: sizes, flags, pickled objects, which programs depend on. For large data, and for
//! reductions of floating-point numbers, every rank is assumed to have the same data, because kernels do not run anyway: a
//! collective copies this rank's own data, and no rank waits for another.

use crate::support::bridge;
use simcuda::exchange::Exchange;
use simcuda::out::Out;
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::path::PathBuf;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

/// The maximum size of the part of a rank that is exchanged, in bytes.
const EXCHANGED_BYTES: usize = 256 << 10;

/// The object to which an `ncclComm_t` points.
#[derive(Debug)]
pub(crate) struct Communicator {
    size: u32,
    rank: u32,
    id: UniqueId,
    /// How often it was split.
    splits: AtomicU64,
    /// `None` where the ranks share no folder.
    exchange: Option<Exchange>,
}

impl Communicator {
    fn new(id: UniqueId, rank: u32, size: u32) -> Self {
        let folder = std::env::var_os("SIMCUDA_SHARED").filter(|path| !path.is_empty()).map(PathBuf::from);
        let exchange = folder.map(|folder| Exchange::new(folder, &id.bytes, rank, size));
        Communicator { size, rank, id, splits: AtomicU64::new(0), exchange }
    }

    /// The connection to the other ranks, if parts of so many bytes are exchanged.
    fn exchange(&self, bytes: usize) -> Option<&Exchange> {
        self.exchange.as_ref().filter(|_| self.size > 1 && bytes <= EXCHANGED_BYTES)
    }

    /// The communicator of the ranks with the same color, in the order of their keys. Without an exchange its size is not
    /// known: it then ends with this rank, whose number is its key.
    fn split(&self, color: c_int, key: c_int) -> Self {
        let own: Vec<u8> = [color.to_le_bytes(), key.to_le_bytes()].concat();
        let parts = self.exchange.as_ref().and_then(|exchange| exchange.all_gather(&own));
        let word =
            |part: &[u8], at: usize| part.get(at..at + 4).map_or(0, |b| c_int::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let id = self.id.of_part(self.splits.fetch_add(1, Ordering::Relaxed), color);
        match parts {
            Some(parts) => {
                let ranks = parts.iter().zip(0..).filter(|(part, _)| word(part, 0) == color);
                let mut ranks: Vec<(c_int, u32)> = ranks.map(|(part, rank)| (word(part, 4), rank)).collect();
                ranks.sort_unstable();
                let rank = ranks.iter().position(|(_, rank)| *rank == self.rank).unwrap_or(0);
                Communicator::new(id, rank as u32, ranks.len() as u32)
            }
            None => Communicator { exchange: None, ..Communicator::new(id, key as u32, key as u32 + 1) },
        }
    }
}

/// `ncclUniqueId`. It is the same on all ranks of a communicator.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct UniqueId {
    bytes: [u8; 128],
}

impl UniqueId {
    /// A new id.
    fn random() -> Self {
        let mut bytes = [1; 128];
        // A kernel without /dev/urandom runs no CUDA program. The ranks of different launches share no folder anyway.
        File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).ok();
        UniqueId { bytes }
    }

    /// The id of the communicator that the ranks with a color get when the one with this id is split for the n-th time.
    fn of_part(mut self, number: u64, color: c_int) -> Self {
        for (salt, bytes) in self.bytes.clone().chunks_exact(8).zip(self.bytes.chunks_exact_mut(8)) {
            // The same in all processes of one build.
            let mut hasher = DefaultHasher::new();
            (salt, number, color).hash(&mut hasher);
            bytes.copy_from_slice(&hasher.finish().to_le_bytes());
        }
        self
    }
}

/// `ncclInvalidArgument`
const INVALID: c_int = 4;
/// `NCCL_SPLIT_NOCOLOR`
const NO_COLOR: c_int = -1;

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
    id.put(UniqueId::random());
    0
}

fn make(out: Out<Box<Communicator>>, size: c_int, id: UniqueId, rank: c_int) -> c_int {
    let (Ok(size), Ok(rank)) = (u32::try_from(size), u32::try_from(rank)) else { return INVALID };
    out.put(Box::new(Communicator::new(id, rank, size)));
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRank(out: Out<Box<Communicator>>, size: c_int, id: UniqueId, rank: c_int) -> c_int {
    make(out, size, id, rank)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankConfig(
    out: Out<Box<Communicator>>,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    _config: *const c_void,
) -> c_int {
    make(out, size, id, rank)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankScalable(
    out: Out<Box<Communicator>>,
    size: c_int,
    rank: c_int,
    _id_count: c_int,
    ids: Out<UniqueId>,
    _config: *const c_void,
) -> c_int {
    // Every rank passes the same ids.
    ids.get().map_or(INVALID, |id| make(out, size, id, rank))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommSplit(
    parent: Option<&Communicator>,
    color: c_int,
    key: c_int,
    out: Out<Box<Communicator>>,
    _config: *const c_void,
) -> c_int {
    let Some(parent) = parent else { return INVALID };
    let part = parent.split(color, key);
    if color != NO_COLOR {
        out.put(Box::new(part));
    }
    0
}

/// One process uses several devices, and each communicator is a rank of its own.
#[unsafe(no_mangle)]
extern "C" fn ncclCommInitAll(out: Out<Box<Communicator>>, size: c_int, _devices: *const c_int) -> c_int {
    let id = UniqueId::random();
    for rank in 0..size {
        // The one thread that calls for all ranks must not wait for itself.
        let rank = rank as u32;
        out.nth(rank as usize)
            .put(Box::new(Communicator { exchange: None, ..Communicator::new(id, rank, size as u32) }));
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
    count.put(communicator.map_or(0, |c| c.size as c_int));
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommUserRank(communicator: Option<&Communicator>, rank: Out<c_int>) -> c_int {
    rank.put(communicator.map_or(0, |c| c.rank as c_int));
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

/// Copies `bytes` bytes as work of a stream. Does nothing for null pointers.
///
/// # Safety
/// `from` is null or valid for reads of `bytes` bytes, and `to` is null or valid for writes of as many.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize, stream: u64) -> c_int {
    let Some(bridge) = bridge() else { return 0 };
    if from.is_null() || to.is_null() || std::ptr::eq(from, to) {
        return (bridge.launch)(stream);
    }
    // SAFETY: the caller guarantees that both buffers are valid for `bytes` bytes.
    unsafe { (bridge.copy)(to as u64, from as u64, bytes, stream) }
}

/// The bytes of a buffer on a device, which other ranks get.
///
/// # Safety
/// `from` is null or valid for reads of `bytes` bytes.
unsafe fn content(from: *const u8, bytes: usize) -> Vec<u8> {
    // SAFETY: the caller guarantees it.
    if from.is_null() { Vec::new() } else { unsafe { slice::from_raw_parts(from, bytes) }.to_vec() }
}

/// The integers of a buffer. `None` for floating-point numbers.
fn integers(bytes: &[u8], kind: c_int) -> Option<Vec<i128>> {
    let element = |bytes: &[u8]| {
        let bits = bytes.iter().rfold(0, |bits: u64, byte| bits << 8 | u64::from(*byte));
        match kind {
            0 => i128::from(bits as i8),
            2 => i128::from(bits as i32),
            4 => i128::from(bits as i64),
            _ => i128::from(bits),
        }
    };
    (0..=5).contains(&kind).then(|| bytes.chunks_exact(element_bytes(kind)).map(element).collect())
}

/// The result of an `ncclRedOp_t` over the parts of all ranks. `None` for floating-point numbers, and for operations that the
/// program defined.
fn reduce(parts: &[Vec<u8>], kind: c_int, operation: c_int) -> Option<Vec<u8>> {
    let combine = |a: i128, b: i128| match operation {
        0 | 4 => Some(a.wrapping_add(b)),
        1 => Some(a.wrapping_mul(b)),
        2 => Some(a.max(b)),
        3 => Some(a.min(b)),
        _ => None,
    };
    let mut parts = parts.iter().map(|part| integers(part, kind));
    let mut result = parts.next()??;
    let mut count = 1;
    for part in parts {
        result = result.into_iter().zip(part?).map(|(a, b)| combine(a, b)).collect::<Option<_>>()?;
        count += 1;
    }
    let divisor = if operation == 4 { count } else { 1 };
    let size = element_bytes(kind);
    Some(result.into_iter().flat_map(|value| (value / divisor).to_le_bytes().into_iter().take(size)).collect())
}

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
    let is_exchanged = count == 1 || (0..=5).contains(&kind);
    // SAFETY: by NCCL's contract the program passes buffers of `count` elements that it may access.
    unsafe {
        let exchange = communicator.filter(|_| is_exchanged).and_then(|c| c.exchange(bytes));
        let parts = exchange.and_then(|exchange| exchange.all_gather(&content(from, bytes)));
        let result = parts.and_then(|parts| reduce(&parts, kind, operation)).filter(|result| result.len() == bytes);
        copy(result.as_ref().map_or(from, |result| result.as_ptr()), to, bytes, stream)
    }
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
    // SAFETY: by NCCL's contract the program passes buffers of `count` elements that it may access. Only the root has `to`.
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
        copy(data.filter(|data| data.len() == bytes).as_ref().map_or(from, |data| data.as_ptr()), to, bytes, stream)
    }
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

/// A receive of a group, which waits until all sends of the group are done.
#[derive(Debug)]
struct Receive {
    to: *mut u8,
    bytes: usize,
    from_rank: u32,
    communicator: *const Communicator,
    stream: u64,
}

impl Receive {
    /// # Safety
    /// The communicator exists, and `to` is valid for writes of `bytes` bytes.
    unsafe fn run(&self) {
        // SAFETY: the caller guarantees that the communicator exists.
        let exchange = unsafe { (*self.communicator).exchange(self.bytes) };
        let data =
            exchange.and_then(|exchange| exchange.receive(self.from_rank)).filter(|data| data.len() == self.bytes);
        // SAFETY: the caller guarantees that `to` is valid, and the data has as many bytes.
        unsafe { copy(data.as_ref().map_or(std::ptr::null(), |data| data.as_ptr()), self.to, self.bytes, self.stream) };
    }
}

/// The open groups of a thread.
struct Groups {
    depth: u32,
    receives: Vec<Receive>,
}

thread_local! {
    static GROUPS: RefCell<Groups> = const { RefCell::new(Groups { depth: 0, receives: Vec::new() }) };
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> c_int {
    GROUPS.with_borrow_mut(|groups| groups.depth += 1);
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> c_int {
    let receives = GROUPS.with_borrow_mut(|groups| {
        groups.depth = groups.depth.saturating_sub(1);
        if groups.depth == 0 { std::mem::take(&mut groups.receives) } else { Vec::new() }
    });
    for receive in receives {
        // SAFETY: by NCCL's contract the communicators and buffers of a group exist until its end.
        unsafe { receive.run() };
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclSend(
    from: *const u8,
    count: usize,
    kind: c_int,
    peer: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    let bytes = count * element_bytes(kind);
    if let Some(exchange) = communicator.and_then(|c| c.exchange(bytes)) {
        // SAFETY: by NCCL's contract `from` has `count` elements. A message that cannot be written does not come, which
        // the receiver notices.
        unsafe { exchange.send(peer as u32, &content(from, bytes)) }.ok();
    }
    // SAFETY: null pointers are allowed.
    unsafe { copy(from, std::ptr::null_mut(), bytes, stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclRecv(
    to: *mut u8,
    count: usize,
    kind: c_int,
    peer: c_int,
    communicator: Option<&Communicator>,
    stream: u64,
) -> c_int {
    let Some(communicator) = communicator else { return INVALID };
    let receive = Receive { to, bytes: count * element_bytes(kind), from_rank: peer as u32, communicator, stream };
    let now = GROUPS.with_borrow_mut(|groups| {
        if groups.depth == 0 {
            return Some(receive);
        }
        groups.receives.push(receive);
        None
    });
    if let Some(receive) = now {
        // SAFETY: by NCCL's contract the communicator exists, and `to` has `count` elements that the program may write.
        unsafe { receive.run() };
    }
    0
}
