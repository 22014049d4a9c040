//! The snapshot of PyTorch's allocator, without Python: `CUDAAllocator::snapshot()`.
//!
//! `torch.cuda.memory_snapshot()` makes a dictionary for each block and holds the GIL meanwhile, microseconds for each.
//! The allocator's own function only copies its lists, under the lock of each device.
//!
//! The layout of the result is private (c10/cuda/CUDACachingAllocator.h, later c10/core/CachingDeviceAllocator.h), the
//! same in 2.4 and 2.11. It is verified: the blocks of each segment must have its size together, those in use its
//! active bytes, and all of a device the active bytes in the entry of the snapshot ([`super::gate`]).

use std::ffi::c_void;

use super::gate;
use super::tracker::{INITIALIZED, SNAPSHOT, find_method};
use crate::arch;
use crate::linker::original::global_symbol;

/// A segment, or a mapped range of an expandable segment.
pub(crate) struct Segment {
    pub(crate) device: i16,
    pub(crate) addr: u64,
    pub(crate) size: u64,
    pub(crate) stream: u64,
    pub(crate) pool: (u64, u64),
    pub(crate) is_expandable: bool,
    pub(crate) blocks: Vec<Block>,
}

/// A block that is in use.
pub(crate) struct Block {
    pub(crate) addr: u64,
    pub(crate) size: u64,
    pub(crate) requested: u64,
    /// Whether the program has freed it, and a stream still uses it.
    pub(crate) is_pending: bool,
}

/// libstdc++'s `std::vector`.
#[repr(C)]
struct StdVector<T> {
    begin: *const T,
    end: *const T,
    capacity: *const T,
}

impl<T> StdVector<T> {
    /// The elements.
    ///
    /// # Safety
    ///
    /// This is a vector of elements with the layout of `T`, or of others with any layout that is readable in its whole
    /// length.
    unsafe fn elements(&self) -> Option<&[T]> {
        let bytes = self.end.addr().checked_sub(self.begin.addr())?;
        if bytes == 0 {
            return Some(&[]);
        }
        let is_plausible = bytes.is_multiple_of(size_of::<T>()) && self.end <= self.capacity && self.begin.is_aligned();
        // SAFETY: the caller guarantees that these bytes are readable.
        (is_plausible && !self.begin.is_null())
            .then(|| unsafe { std::slice::from_raw_parts(self.begin, bytes / size_of::<T>()) })
    }
}

/// `BlockInfo`.
#[repr(C)]
struct BlockInfo {
    size: u64,
    requested_size: u64,
    gc_counter: i32,
    allocated: u8,
    active: u8,
    context: [usize; 2],
}

/// `SegmentInfo`.
#[repr(C)]
struct SegmentInfo {
    /// One byte, eight before 2.4.
    device: i8,
    address: u64,
    total_size: u64,
    requested_size: u64,
    allocated_size: u64,
    active_size: u64,
    stream: u64,
    is_large: u8,
    is_expandable: u8,
    pool: [u64; 2],
    blocks: StdVector<BlockInfo>,
    context: [usize; 2],
}

/// The storage of a `SnapshotInfo`: the segments, the traces of each device, annotations and settings. It has less than
/// half of this size.
const SNAPSHOT_WORDS: usize = 256;

/// Whether PyTorch has initialized its allocator.
pub(crate) fn is_initialized() -> Result<bool, &'static str> {
    let (allocator, method, _) = find_method(INITIALIZED)?;
    // SAFETY: `method` is the slot of `bool initialized()` in the vtable of `allocator`.
    Ok(unsafe {
        let method: unsafe extern "C-unwind" fn(*mut c_void) -> bool = std::mem::transmute(method);
        method(allocator)
    })
}

/// The segments of all devices with the blocks that are in use. The error says why they cannot be read.
///
/// `is_state` says that the events that follow belong to this snapshot. Otherwise it shows whether the layout is known.
pub(crate) fn take(is_state: bool) -> Result<Vec<Segment>, &'static str> {
    type Delete = unsafe extern "C" fn(*mut c_void);
    let (allocator, method, _) = find_method(SNAPSHOT)?;
    // SAFETY: the type of `operator delete(void*)`.
    let delete = unsafe { global_symbol::<Delete>(c"_ZdlPv") }.ok_or("there is no operator delete")?;
    let mut storage = [0usize; SNAPSHOT_WORDS];
    // SAFETY: `method` is the slot of `snapshot` in the vtable of `allocator`. From 2.7 on there is a third argument,
    // the id of a pool (0, 0: all), a pair of two words that is passed in two registers, and later a fourth, whether to
    // copy the traces. Functions without them ignore the registers.
    let segments = unsafe {
        let method = std::ptr::with_exposed_provenance(method);
        let result = storage.as_mut_ptr().cast();
        let call = || arch::call_constructing(method, result, allocator.expose_provenance() as u64, 0, 0, 0);
        if is_state {
            gate::while_taking_snapshot(call);
        } else {
            call();
        }
        &*storage.as_ptr().cast::<StdVector<SegmentInfo>>()
    };
    // SAFETY: the result begins with a vector, whatever the layout of its elements.
    let infos = unsafe { segments.elements() }.ok_or("the layout of PyTorch's snapshot is not known")?;
    let mut found = Vec::with_capacity(infos.len());
    for info in infos {
        // SAFETY: a vector, if the layout is right. Otherwise the sizes before would not be those of a segment, which
        // `is_segment` has checked.
        let segment = is_segment(info).then(|| unsafe { segment(info) }).flatten();
        found.push(segment.ok_or("the layout of PyTorch's snapshot is not known")?);
    }
    // The layout is right. The memory of the lists is given back; the rest of the result has a few hundred bytes.
    let lists = infos.iter().map(|info| info.blocks.begin.cast_mut().cast::<c_void>());
    for list in lists.chain([segments.begin.cast_mut().cast()]).filter(|list| !list.is_null()) {
        // SAFETY: libstdc++'s vectors get their memory from `operator new`, and nobody else knows these. Contexts of
        // elements, which exist only while PyTorch records a history of its own, are not released.
        unsafe { delete(list) };
    }
    Ok(found)
}

/// Whether the plain fields are those of a segment.
fn is_segment(info: &SegmentInfo) -> bool {
    const MAX_BYTES: u64 = 1 << 46;
    const PAGE: u64 = 512;
    info.total_size > 0
        && info.total_size < MAX_BYTES
        && info.total_size.is_multiple_of(PAGE)
        && info.address.is_multiple_of(PAGE)
        && info.allocated_size <= info.active_size
        && info.active_size <= info.total_size
        && info.requested_size <= info.total_size
        && info.is_large <= 1
        && info.is_expandable <= 1
        && info.device >= 0
        && info.blocks.begin.is_aligned()
        && info.blocks.begin.addr() > PAGE as usize
}

/// Reads a segment. `None` if its blocks do not have its sizes.
///
/// # Safety
///
/// `info` has a vector at the place of its blocks.
unsafe fn segment(info: &SegmentInfo) -> Option<Segment> {
    // SAFETY: the caller guarantees a vector.
    let infos = unsafe { info.blocks.elements() }?;
    let (mut at, mut active) = (info.address, 0u64);
    let mut blocks = Vec::new();
    for block in infos {
        if block.allocated > 1 || block.active > 1 || block.size > info.total_size {
            return None;
        }
        if block.active == 1 {
            active += block.size;
            let is_pending = block.allocated == 0;
            blocks.push(Block { addr: at, size: block.size, requested: block.requested_size, is_pending });
        }
        at = at.checked_add(block.size)?;
    }
    (at - info.address == info.total_size && active == info.active_size).then(|| Segment {
        device: info.device.into(),
        addr: info.address,
        size: info.total_size,
        stream: info.stream,
        pool: info.pool.into(),
        is_expandable: info.is_expandable == 1,
        blocks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(size: u64, allocated: u8, active: u8) -> BlockInfo {
        BlockInfo { size, requested_size: size - 12, gc_counter: -7, allocated, active, context: [0; 2] }
    }

    #[test]
    fn a_segment_is_read_only_if_its_blocks_have_its_sizes() {
        assert_eq!((size_of::<BlockInfo>(), size_of::<SegmentInfo>()), (40, 120));
        let blocks = [block(512, 1, 1), block(1024, 0, 0), block(2560, 0, 1)];
        let range = blocks.as_ptr_range();
        let mut info = SegmentInfo {
            device: 1,
            address: 0x7f00_0000_0000,
            total_size: 4096,
            requested_size: 3000,
            allocated_size: 512,
            active_size: 3072,
            stream: 9,
            is_large: 0,
            is_expandable: 1,
            pool: [0, 3],
            blocks: StdVector { begin: range.start, end: range.end, capacity: range.end },
            context: [0; 2],
        };
        // SAFETY: the blocks of `info` are those of the array `blocks`.
        let read = |info: &SegmentInfo| if is_segment(info) { unsafe { segment(info) } } else { None };
        let found = read(&info).unwrap();
        assert_eq!(
            (found.device, found.size, found.stream, found.pool, found.is_expandable),
            (1, 4096, 9, (0, 3), true)
        );
        let blocks: Vec<_> =
            found.blocks.iter().map(|b| (b.addr - found.addr, b.size, b.requested, b.is_pending)).collect();
        assert_eq!(blocks, [(0, 512, 500, false), (1536, 2560, 2548, true)]);
        info.active_size = 2560;
        assert!(read(&info).is_none());
        (info.active_size, info.total_size) = (3072, 4608);
        assert!(read(&info).is_none());
    }
}
