//! The allocator of this library. Its memory comes from the kernel, never from the program's `malloc`.
//!
//! The program may replace `malloc` (jemalloc, tcmalloc, a debugging one), and a hook may run inside it. Such a library
//! calls `dlsym` while it initializes itself, or a signal handler interrupts it. A profiler's `malloc` walks the loaded
//! objects under its own lock while we allocate under the loader's. Each case would be a deadlock or an endless
//! recursion.
//!
//! Constraints: it is lock-free, so a signal handler may interrupt it and a fork at any moment leaves it consistent.
//! Freed blocks return to the free list of their size; large allocations return to the kernel. If the kernel refuses
//! memory, a reserve lasts until the hooks have noticed ([`is_exhausted`]).

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// The global allocator.
struct Heap;

#[global_allocator]
static HEAP: Heap = Heap;

/// The size of the smallest pages of a kernel in bytes. The kernel rounds the size of a mapping up to its own.
const PAGE: usize = 4096;
/// The smallest block size in bytes. All block sizes are powers of two.
const MIN_BLOCK: usize = 16;
/// The number of block sizes, up to 64 KiB. A larger allocation has its own pages.
const SIZE_CLASSES: usize = 13;
const MAX_BLOCK: usize = MIN_BLOCK << (SIZE_CLASSES - 1);

/// The free list of each block size. The low bits are the address of the first block in units of [`MIN_BLOCK`].
///
/// The high bits count changes. So a list that was changed and restored meanwhile does not compare equal (the ABA
/// problem).
static FREE_LISTS: [AtomicU64; SIZE_CLASSES] = [const { AtomicU64::new(0) }; SIZE_CLASSES];
const ADDRESS_BITS: u32 = 44;
const ADDRESS_MASK: u64 = (1 << ADDRESS_BITS) - 1;

fn with_first_block(list: u64, first: usize) -> u64 {
    (list & !ADDRESS_MASK).wrapping_add(1 << ADDRESS_BITS) | (first / MIN_BLOCK) as u64
}

fn first_block(list: u64) -> usize {
    (list & ADDRESS_MASK) as usize * MIN_BLOCK
}

/// The free list for this layout, and its block size in bytes. `None` if the allocation has its own pages.
fn size_class(layout: &Layout) -> Option<(&'static AtomicU64, usize)> {
    let size = layout.size().max(layout.align()).max(MIN_BLOCK).checked_next_power_of_two()?;
    let index = (size.trailing_zeros() - MIN_BLOCK.trailing_zeros()) as usize;
    FREE_LISTS.get(index).map(|list| (list, size))
}

/// The word of a free block that links to the next.
///
/// # Safety
///
/// `block` is the address of a block of this allocator. Those are never unmapped.
unsafe fn next_of<'a>(block: usize) -> &'a AtomicU64 {
    // SAFETY: the caller guarantees a block, which is mapped and aligned to 16 bytes. If another thread uses it
    // meanwhile, the list's counter has changed and the value read is discarded.
    unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(block) }
}

fn pop(list: &AtomicU64, size: usize) -> *mut u8 {
    let mut seen = list.load(Ordering::Acquire);
    loop {
        let block = first_block(seen);
        if block == 0 {
            return refill(list, size);
        }
        // SAFETY: the list contains only blocks of this allocator.
        let next = unsafe { next_of(block) }.load(Ordering::Relaxed) as usize;
        match list.compare_exchange_weak(seen, with_first_block(seen, next), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return std::ptr::with_exposed_provenance_mut(block),
            Err(now) => seen = now,
        }
    }
}

/// Pushes a chain of blocks, linked from `first` to `last`, onto the list.
fn push(list: &AtomicU64, first: usize, last: usize) {
    let mut seen = list.load(Ordering::Acquire);
    loop {
        // SAFETY: the caller owns this block of the allocator.
        unsafe { next_of(last) }.store(first_block(seen) as u64, Ordering::Relaxed);
        match list.compare_exchange_weak(seen, with_first_block(seen, first), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return,
            Err(now) => seen = now,
        }
    }
}

/// Maps new blocks. Returns one of them and pushes the others onto the list.
#[cold]
fn refill(list: &AtomicU64, size: usize) -> *mut u8 {
    let bytes = (size * 8).max(4 * PAGE);
    let chunk = map_pages(bytes);
    if chunk.is_null() {
        return from_reserve(size);
    }
    let chunk = chunk.expose_provenance();
    let (first, last) = (chunk + size, chunk + bytes - size);
    for block in (first..last).step_by(size) {
        // SAFETY: the block is inside the new chunk, which no other thread has.
        unsafe { next_of(block) }.store((block + size) as u64, Ordering::Relaxed);
    }
    push(list, first, last);
    std::ptr::with_exposed_provenance_mut(chunk)
}

/// Maps zeroed pages. Null if the kernel refuses.
fn map_pages(bytes: usize) -> *mut u8 {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: creates a new mapping at an address that the kernel chooses.
    let pages = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if pages == libc::MAP_FAILED { std::ptr::null_mut() } else { pages.cast() }
}

/// The reserve for when the kernel refuses memory. It takes no physical memory before.
#[repr(align(4096))]
struct Reserve(std::cell::UnsafeCell<[u8; RESERVE_BYTES]>);
const RESERVE_BYTES: usize = 512 << 10;
// SAFETY: `RESERVE_USED` hands out each piece once, so no two users share a byte.
unsafe impl Sync for Reserve {}
static RESERVE_MEMORY: Reserve = Reserve(std::cell::UnsafeCell::new([0; RESERVE_BYTES]));
static RESERVE_USED: AtomicUsize = AtomicUsize::new(0);
static IS_EXHAUSTED: AtomicBool = AtomicBool::new(false);

/// Allocates a block from the reserve. A freed one returns to the list of its size like any other.
fn from_reserve(size: usize) -> *mut u8 {
    IS_EXHAUSTED.store(true, Ordering::Relaxed);
    let mut used = RESERVE_USED.load(Ordering::Relaxed);
    loop {
        let at = used.next_multiple_of(size.min(PAGE));
        if at + size > RESERVE_BYTES {
            return std::ptr::null_mut();
        }
        match RESERVE_USED.compare_exchange_weak(used, at + size, Ordering::Relaxed, Ordering::Relaxed) {
            // SAFETY: the range is inside the reserve, and the exchange has given it to this caller alone.
            Ok(_) => return unsafe { RESERVE_MEMORY.0.get().cast::<u8>().add(at) },
            Err(now) => used = now,
        }
    }
}

/// Whether the kernel has refused memory. The rest of the reserve is for ending the recording.
pub(crate) fn is_exhausted() -> bool {
    IS_EXHAUSTED.load(Ordering::Relaxed)
}

fn whole_pages(layout: &Layout) -> usize {
    layout.size().next_multiple_of(PAGE)
}

// SAFETY: blocks are disjoint and have the requested size and alignment (chunks begin at a page). They stay mapped
// until they are freed.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match size_class(&layout) {
            Some((list, size)) => pop(list, size),
            None if layout.align() > PAGE => std::ptr::null_mut(),
            None => {
                let pages = map_pages(whole_pages(&layout));
                if pages.is_null() { from_reserve(whole_pages(&layout)) } else { pages }
            }
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller guarantees the layout. New pages are zeroed, and so are pieces of the reserve that were
        // never used.
        unsafe {
            let block = self.alloc(layout);
            if size_class(&layout).is_some() && !block.is_null() {
                block.write_bytes(0, layout.size());
            }
            block
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match size_class(&layout) {
            Some((list, _)) => push(list, block.expose_provenance(), block.expose_provenance()),
            None if is_reserve(block) => {}
            // SAFETY: the caller guarantees that the block was allocated with this layout, so these are pages of our
            // own.
            None => unsafe {
                libc::munmap(block.cast(), whole_pages(&layout));
            },
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the alignment was valid, and the caller guarantees a valid size.
        let new_layout = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (size_class(&layout), size_class(&new_layout)) {
            (Some((_, old_size)), Some((_, new_size))) if old_size == new_size => return block,
            (None, None) if !is_reserve(block) && layout.align() <= PAGE => {
                // SAFETY: the caller guarantees that the block was allocated with this layout, so these are pages of
                // our own.
                let moved = unsafe {
                    libc::mremap(block.cast(), whole_pages(&layout), whole_pages(&new_layout), libc::MREMAP_MAYMOVE)
                };
                return if moved == libc::MAP_FAILED { std::ptr::null_mut() } else { moved.cast() };
            }
            _ => {}
        }
        // SAFETY: both blocks are at least as large as the bytes copied. The caller owns the old one and gives it up.
        unsafe {
            let new = self.alloc(new_layout);
            if !new.is_null() {
                std::ptr::copy_nonoverlapping(block, new, layout.size().min(size));
                self.dealloc(block, layout);
            }
            new
        }
    }
}

fn is_reserve(block: *mut u8) -> bool {
    let start = RESERVE_MEMORY.0.get().addr();
    (start..start + RESERVE_BYTES).contains(&block.addr())
}

const _: () = assert!(MAX_BLOCK == 64 << 10);

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(size: usize, align: usize, value: u8) -> (*mut u8, Layout) {
        let layout = Layout::from_size_align(size, align).unwrap();
        // SAFETY: the block has the size that is written.
        unsafe {
            let block = HEAP.alloc(layout);
            assert!(!block.is_null() && block.addr().is_multiple_of(align), "{layout:?}");
            block.write_bytes(value, size);
            (block, layout)
        }
    }

    fn is_filled(block: *mut u8, size: usize, value: u8) -> bool {
        // SAFETY: the block has this size and was initialized.
        unsafe { std::slice::from_raw_parts(block, size) }.iter().all(|byte| *byte == value)
    }

    #[test]
    fn blocks_are_aligned_and_disjoint() {
        for size in [1, 16, 17, 1000, 4096, 5000, MAX_BLOCK, MAX_BLOCK + 1, 1 << 20] {
            for align in [1, 16, 64, 128, 4096] {
                let blocks: Vec<_> = (0..40).map(|value| filled(size, align, value)).collect();
                for (value, (block, layout)) in (0..).zip(blocks) {
                    assert!(is_filled(block, size, value), "{size} {align}");
                    // SAFETY: each block is freed once, with its layout.
                    unsafe { HEAP.dealloc(block, layout) };
                }
            }
        }
    }

    #[test]
    fn contents_survive_growing_and_shrinking() {
        let (mut block, mut layout) = filled(10, 8, 7);
        for size in [12, 16, 17, 5000, MAX_BLOCK, MAX_BLOCK + 1, 3 << 20, 1 << 20, MAX_BLOCK, 10] {
            // SAFETY: `layout` is the block's layout.
            block = unsafe { HEAP.realloc(block, layout, size) };
            layout = Layout::from_size_align(size, 8).unwrap();
            assert!(is_filled(block, 10, 7), "{size}");
        }
        // SAFETY: the block is freed once, with its layout.
        unsafe { HEAP.dealloc(block, layout) };
    }

    #[test]
    fn threads_never_share_a_block() {
        let work = |thread: usize| {
            let mut random = thread as u64 * 2 + 1;
            let mut blocks: Vec<(*mut u8, Layout, u8)> = Vec::new();
            for turn in 0..20_000_usize {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                if blocks.len() > 50 {
                    let (block, layout, value) = blocks.swap_remove(random as usize % 50);
                    assert!(is_filled(block, layout.size(), value));
                    // SAFETY: the block is freed once, with its layout.
                    unsafe { HEAP.dealloc(block, layout) };
                }
                let value = (turn * 4 + thread) as u8;
                let (block, layout) = filled(1 + random as usize % 100, 8, value);
                blocks.push((block, layout, value));
            }
            blocks.iter().all(|(block, layout, value)| is_filled(*block, layout.size(), *value))
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|thread| scope.spawn(move || work(thread))).collect();
            assert!(threads.into_iter().all(|t| t.join().unwrap()));
        });
    }
}
