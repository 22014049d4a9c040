//! Measures the memory that reading a file takes, with an allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use memtrace_input::{Error, Run, open_run};
use memtrace_trace::file::budget::{MEMORY_FLOOR, MEMORY_PER_BYTE};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static TOTAL: AtomicUsize = AtomicUsize::new(0);
/// Tests run in one process, and one measures at a time.
static MEASURING: Mutex<()> = Mutex::new(());

struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn add(bytes: usize) {
    PEAK.fetch_max(LIVE.fetch_add(bytes, Relaxed) + bytes, Relaxed);
    TOTAL.fetch_add(bytes, Relaxed);
}

// SAFETY: every call is passed to the system's allocator with unchanged arguments, and its result is returned.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller guarantees a layout of non-zero size, which `System` requires too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller guarantees a layout of non-zero size, which `System` requires too.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller guarantees that this allocator, and so `System`, returned `at` for this layout.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        // The system's allocator moves large blocks without a copy.
        LIVE.fetch_sub(layout.size(), Relaxed);
        add(new);
        // SAFETY: the caller guarantees that this allocator, and so `System`, returned `at` for this layout, and that
        // `new` is valid.
        unsafe { System.realloc(at, layout, new) }
    }
}

/// The cost of a piece of work, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// The most memory at once, beyond what was in use before.
    pub(crate) peak: usize,
    /// All allocations together, a measure of the work.
    pub(crate) total: usize,
}

/// Does the work and measures it.
pub(crate) fn measure<T>(work: impl FnOnce() -> T) -> (T, Cost) {
    let _one_at_a_time = MEASURING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (live, total) = (LIVE.load(Relaxed), TOTAL.load(Relaxed));
    PEAK.store(live, Relaxed);
    let result = work();
    let cost = Cost { peak: PEAK.load(Relaxed).saturating_sub(live), total: TOTAL.load(Relaxed) - total };
    (result, cost)
}

/// The memory that files of this size may take, with what the budget does not count: vectors have up to twice the
/// length that is charged, and reading needs some buffers.
pub(crate) fn allowed(size: usize) -> usize {
    2 * (MEMORY_FLOOR as usize + size * MEMORY_PER_BYTE as usize) + (64 << 20)
}

/// Opens the run at `path`, streams its events, and requires that this takes no more memory than `size` bytes of files
/// may.
pub(crate) fn open_measured(path: &Path, size: usize) -> (Result<Run, Error>, Cost) {
    let (run, cost) = measure(|| {
        let run = open_run(path)?;
        for process in run.processes() {
            process.recording().stream(&mut |_| {});
        }
        Ok(run)
    });
    assert!(cost.peak <= allowed(size), "{} bytes of files take {cost:?}, allowed are {}", size, allowed(size));
    (run, cost)
}
