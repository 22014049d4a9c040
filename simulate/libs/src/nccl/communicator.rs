//! Communicators: their ranks, and the connection between them.

use super::INVALID;
use crate::device_memory::MappedMemory;
use crate::support::{load, nvlinks, takes_memory};
use simcuda::exchange::Exchange;
use simcuda::library_memory::{Kernels, NCCL_BUFFER_BYTES, NCCL_BUFFERS, NCCL_BUFFERS_WITHOUT_NVLINK};
use simcuda::out::Out;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// The maximum size of the part of a rank that is exchanged, in bytes.
const EXCHANGED_BYTES: usize = 256 << 10;

/// `ncclRemoteError`
const REMOTE_ERROR: c_int = 6;
/// The text about the first error. PyTorch asks for it without a communicator.
static LAST_ERROR: OnceLock<CString> = OnceLock::new();

/// The object to which an `ncclComm_t` points.
#[derive(Debug)]
pub(super) struct Communicator {
    /// The number of ranks.
    pub(super) size: u32,
    /// The number of this rank.
    pub(super) rank: u32,
    id: UniqueId,
    /// How often it was split.
    splits: AtomicU64,
    /// `None` where the ranks share no folder.
    exchange: Option<Exchange>,
    /// The memory that the communicator allocates for itself.
    buffers: Vec<MappedMemory>,
}

impl Communicator {
    fn new(id: UniqueId, rank: u32, size: u32) -> Self {
        let folder = std::env::var_os("SIMCUDA_SHARED").filter(|path| !path.is_empty()).map(PathBuf::from);
        let exchange = folder.map(|folder| Exchange::new(folder, &id.bytes, rank, size));
        Communicator { size, rank, id, splits: AtomicU64::new(0), exchange, buffers: Vec::new() }
    }

    /// Allocates the buffers of the communicator. `None` if the device has too little memory.
    fn with_buffers(mut self) -> Option<Self> {
        let has_nvlink = nvlinks() > 0;
        if takes_memory() {
            let count = if has_nvlink || self.size < 2 { NCCL_BUFFERS } else { NCCL_BUFFERS_WITHOUT_NVLINK };
            self.buffers = (0..count).map(|_| MappedMemory::allocate(NCCL_BUFFER_BYTES)).collect::<Option<_>>()?;
        }
        load(Kernels::of_rank(self.rank, self.size, has_nvlink, version())).then_some(self)
    }

    /// The connection to the other ranks, if parts of so many bytes are exchanged.
    pub(super) fn exchange(&self, bytes: usize) -> Option<&Exchange> {
        self.exchange.as_ref().filter(|_| self.size > 1 && bytes <= EXCHANGED_BYTES)
    }

    /// The status of a function that waited for other ranks.
    pub(super) fn status(&self) -> c_int {
        let Some(rank) = self.exchange.as_ref().and_then(Exchange::lost) else { return 0 };
        LAST_ERROR.get_or_init(|| CString::new(format!("the process of rank {rank} has ended")).unwrap_or_default());
        REMOTE_ERROR
    }

    /// The communicator of the ranks with the same color, in the order of their keys. Without an exchange its size is
    /// not known: it then ends with this rank, whose number is its key.
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
pub(super) struct UniqueId {
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

/// `ncclUnhandledCudaError`, as for a device without enough memory.
const UNHANDLED_CUDA_ERROR: c_int = 1;
/// `NCCL_SPLIT_NOCOLOR`
const NO_COLOR: c_int = -1;

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(status: c_int) -> *const c_char {
    // NCCL's own text.
    let remote = c"remote process exited or there was a network error";
    if status == REMOTE_ERROR { remote.as_ptr() } else { c"simulated NCCL status".as_ptr() }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_communicator: Option<&Communicator>) -> *const c_char {
    LAST_ERROR.get().map_or(c"".as_ptr(), |text| text.as_ptr())
}

/// The version of NCCL: 10000 * major + 100 * minor + patch. `simcuda-build` sets it in the file, so the compiler must
/// not know the value.
#[allow(non_upper_case_globals)]
#[unsafe(no_mangle)]
static simcuda_nccl_version: AtomicI32 = AtomicI32::new(22809);

fn version() -> c_int {
    simcuda_nccl_version.load(Ordering::Relaxed)
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetVersion(out: Out<c_int>) -> c_int {
    out.put(version());
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetUniqueId(id: Out<UniqueId>) -> c_int {
    id.put(UniqueId::random());
    0
}

fn make(out: Out<Box<Communicator>>, size: c_int, id: UniqueId, rank: c_int) -> c_int {
    let (Ok(size), Ok(rank)) = (u32::try_from(size), u32::try_from(rank)) else { return INVALID };
    let Some(communicator) = Communicator::new(id, rank, size).with_buffers() else { return UNHANDLED_CUDA_ERROR };
    out.put(Box::new(communicator));
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
        let Some(part) = part.with_buffers() else { return UNHANDLED_CUDA_ERROR };
        out.put(Box::new(part));
    }
    parent.status()
}

/// One process uses several devices, and each communicator is a rank of its own.
#[unsafe(no_mangle)]
extern "C" fn ncclCommInitAll(out: Out<Box<Communicator>>, size: c_int, _devices: *const c_int) -> c_int {
    let id = UniqueId::random();
    for rank in 0..size {
        // The one thread that calls for all ranks must not wait for itself.
        let rank = rank as u32;
        let communicator = Communicator { exchange: None, ..Communicator::new(id, rank, size as u32) };
        let Some(communicator) = communicator.with_buffers() else { return UNHANDLED_CUDA_ERROR };
        out.nth(rank as usize).put(Box::new(communicator));
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
