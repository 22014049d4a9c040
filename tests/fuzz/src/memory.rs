//! An allocator with a limit: an input of a few kilobytes must not make a reader allocate gigabytes, whatever lengths
//! it contains.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The limit in bytes for all live memory. An input of at most 64 KiB may take 144 MiB
/// ([`memtrace_trace::file::budget`]); growing vectors and the results of the analysis take as much again.
const LIMIT: usize = 512 << 20;

/// The limit in bytes for one allocation. libFuzzer's `-malloc_limit_mb` needs a sanitizer, which these builds do not
/// have.
const ALLOCATION_LIMIT: usize = 256 << 20;

static LIVE: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with a limit.
pub struct LimitedAllocator;

#[global_allocator]
static ALLOCATOR: LimitedAllocator = LimitedAllocator;

fn take(bytes: usize) {
    if bytes > ALLOCATION_LIMIT {
        panic!("one allocation of {bytes} bytes");
    }
    if LIVE.fetch_add(bytes, Relaxed).saturating_add(bytes) > LIMIT {
        // Reset the count so that the panic message can be formatted.
        LIVE.store(0, Relaxed);
        panic!("more than {LIMIT} bytes of memory");
    }
}

// SAFETY: every call is passed to the system's allocator with unchanged arguments. A refusal panics before memory is
// returned.
unsafe impl GlobalAlloc for LimitedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller guarantees a layout of non-zero size, which `System` requires too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller guarantees a layout of non-zero size, which `System` requires too.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let live = LIVE.load(Relaxed);
        LIVE.store(live.saturating_sub(layout.size()), Relaxed);
        // SAFETY: the caller guarantees that this allocator, and so `System`, returned `at` for this layout.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        if new > layout.size() {
            take(new - layout.size());
        } else {
            LIVE.fetch_sub((layout.size() - new).min(LIVE.load(Relaxed)), Relaxed);
        }
        // SAFETY: the caller guarantees that this allocator, and so `System`, returned `at` for this layout, and that
        // `new` is valid.
        unsafe { System.realloc(at, layout, new) }
    }
}
