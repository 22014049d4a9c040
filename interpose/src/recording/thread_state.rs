//! The state of a thread that is stored with its ring: the ring's producer and the stack caches.
//!
//! When the thread ends, the next owner of the ring takes over this state. Nothing here has a destructor, so a thread
//! may end in any way.
//!
//! The kernel clears this memory in a forked child (`MADV_WIPEONFORK`), no matter how the child was created. There no
//! thread has a ring yet. A hook notices this with the check for a ring that it makes anyway.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_trace::shm::layout::RING_COUNT;
use memtrace_trace::shm::ring::{Producer, Ring};

use memtrace_stackwalk::{NativeStacks, ThreadStacks};

/// The state of a ring's owner. All zeros means that it is not initialized.
#[repr(C, align(128))]
pub(crate) struct ThreadState {
    is_ready: AtomicBool,
    /// Whether it was initialized when a recording ended that memtrace had attached for. The content is whole, once its
    /// owner has left its hook.
    was_ready: AtomicBool,
    recorder: UnsafeCell<MaybeUninit<ThreadRecorder>>,
}

/// The content of an initialized [`ThreadState`].
pub(crate) struct ThreadRecorder {
    /// Writes to the ring.
    pub(crate) producer: Producer<'static>,
    /// The Python frames of the last capture.
    pub(crate) python_stacks: ThreadStacks,
    /// The native frames of the last capture.
    pub(crate) native_stacks: NativeStacks,
}

impl ThreadState {
    /// Whether the state is initialized. It is not before the first claim and in a forked child.
    #[inline(always)]
    pub(crate) fn is_initialized(&self) -> bool {
        self.is_ready.load(Ordering::Relaxed)
    }

    /// Initializes the state, unless it is initialized.
    ///
    /// # Safety
    ///
    /// Only the owner of the ring may call this, and no borrow of the state exists.
    pub(crate) unsafe fn initialize(&self, ring: Ring<'static>) {
        if self.is_initialized() {
            return;
        }
        if self.was_ready.swap(false, Ordering::Relaxed) {
            // SAFETY: the state was initialized, and the caller guarantees that it is its only user.
            unsafe { (*self.recorder.get()).assume_init_mut() }.producer = Producer::new(ring);
        } else {
            let recorder = ThreadRecorder {
                producer: Producer::new(ring),
                python_stacks: ThreadStacks::new(),
                native_stacks: NativeStacks::new(),
            };
            // SAFETY: the caller guarantees that it is the only user of this state.
            unsafe { (*self.recorder.get()).write(recorder) };
        }
        self.is_ready.store(true, Ordering::Relaxed);
    }

    /// Makes the state uninitialized. Its content is forgotten and not freed, because it may be half written.
    ///
    /// # Safety
    ///
    /// Only the owner of the ring may call this, and no borrow of the state is used any more.
    pub(crate) unsafe fn reset(&self) {
        self.was_ready.store(false, Ordering::Relaxed);
        self.is_ready.store(false, Ordering::Relaxed);
    }

    /// Borrows the state.
    ///
    /// # Safety
    ///
    /// [`Self::is_initialized`] is true. Only the owner of the ring may call this, and it uses only one result at a
    /// time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "the ring's owner word is the lock")]
    pub(crate) unsafe fn borrow(&self) -> &mut ThreadRecorder {
        // SAFETY: the caller guarantees that the state is initialized and not borrowed.
        unsafe { (*self.recorder.get()).assume_init_mut() }
    }
}

/// One [`ThreadState`] for each ring. A copy is the same memory.
#[derive(Clone, Copy)]
pub(crate) struct ThreadStates(NonNull<ThreadState>);

// SAFETY: only the owner of a ring uses its element, and the ring's owner word decides who that is (`Guard::enter`).
unsafe impl Sync for ThreadStates {}
// SAFETY: the memory is never unmapped and belongs to no thread.
unsafe impl Send for ThreadStates {}

impl ThreadStates {
    /// Size of the address space in bytes.
    pub(crate) const SIZE: usize = RING_COUNT * size_of::<ThreadState>();

    /// Maps the memory. `None` if the kernel has none, or cannot clear it on fork (before Linux 4.14).
    pub(crate) fn new() -> Option<ThreadStates> {
        map_wiped_on_fork(ThreadStates::SIZE).map(|memory| ThreadStates(memory.cast()))
    }

    /// Makes all states uninitialized, so that each thread looks for a ring again at its next event. A thread that uses
    /// its state now may do so until it leaves its hook.
    pub(crate) fn leave_all(&self) {
        (0..RING_COUNT).filter_map(|index| self.get(index)).filter(|state| state.is_initialized()).for_each(|state| {
            state.was_ready.store(true, Ordering::Relaxed);
            state.is_ready.store(false, Ordering::Relaxed);
        });
    }

    /// The state of ring `index`. `None` if there is no such ring.
    pub(crate) fn get(&self, index: usize) -> Option<&ThreadState> {
        // SAFETY: the index is below the number of mapped elements. The memory is never unmapped, and zeros are a valid
        // value.
        (index < RING_COUNT).then(|| unsafe { self.0.add(index).as_ref() })
    }
}

/// Maps zeroed pages that read as zeros in every forked child until it writes to them. They are never unmapped. `None`
/// if the kernel refuses.
pub(crate) fn map_wiped_on_fork(bytes: usize) -> Option<NonNull<u8>> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: creates a new anonymous mapping at an address that the kernel chooses.
    let pages = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if pages == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: these are our own pages of this size.
    if unsafe { libc::madvise(pages, bytes, libc::MADV_WIPEONFORK) } != 0 {
        // SAFETY: these are our own pages, and no other code has their address.
        unsafe { libc::munmap(pages, bytes) };
        return None;
    }
    NonNull::new(pages.cast())
}
