//! Memory that is counted: bytes of a few kilobytes must not make a reader take gigabytes, whatever lengths they tell.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// No reader may have more than this at once. The largest that is meant: the tables of one trace, [`memtrace_trace::file`].
const LIMIT: usize = 1 << 30;

static LIVE: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, with a limit.
pub struct Metered;

#[global_allocator]
static METERED: Metered = Metered;

fn take(bytes: usize) {
    if LIVE.fetch_add(bytes, Relaxed).saturating_add(bytes) > LIMIT {
        // So that the report can be made.
        LIVE.store(0, Relaxed);
        panic!("more than {LIMIT} bytes of memory");
    }
}

// SAFETY: the system's allocator does the work; a refusal panics before anything is given.
unsafe impl GlobalAlloc for Metered {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let live = LIVE.load(Relaxed);
        LIVE.store(live.saturating_sub(layout.size()), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        if new > layout.size() {
            take(new - layout.size());
        } else {
            LIVE.fetch_sub((layout.size() - new).min(LIVE.load(Relaxed)), Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, new) }
    }
}
