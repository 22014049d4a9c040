//! What a thread has for itself: the writing end of its ring and its stack cache, kept beside the ring and handed on
//! with it when the thread is gone. Nothing here has a destructor, so threads may end in any way.
//!
//! The memory is wiped in a forked child (`MADV_WIPEONFORK`), whichever way the child was made: there nobody has a ring yet, and the
//! look that a hook takes anyway, whether its thread has one, says so.

use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use memtrace_trace::shm::layout::RING_COUNT;
use memtrace_trace::shm::ring::{Producer, Ring};

use crate::stack::{NativeStacks, ThreadStacks};

/// The part of a thread's state that outlives it. All zeroes: not made yet.
#[repr(C, align(128))]
pub(crate) struct Local {
    made: Cell<bool>,
    inner: UnsafeCell<MaybeUninit<Inner>>,
}

/// See [`Local`].
pub(crate) struct Inner {
    /// The ring's writing end.
    pub(crate) producer: Producer<'static>,
    /// The last walk of Python frames.
    pub(crate) stacks: ThreadStacks,
    /// The last walk of native frames.
    pub(crate) native: NativeStacks,
}

impl Local {
    /// Whether there is something to borrow: not before the first claim, and not in a forked child.
    #[inline(always)]
    pub(crate) fn is_made(&self) -> bool {
        self.made.get()
    }

    /// Makes what is there, if it is not.
    ///
    /// # Safety
    /// Only the owner of the ring may call, and nothing may be borrowed.
    pub(crate) unsafe fn make(&self, ring: Ring<'static>) {
        if !self.made.get() {
            let inner =
                Inner { producer: Producer::new(ring), stacks: ThreadStacks::new(), native: NativeStacks::new() };
            // SAFETY: the caller's promise.
            unsafe { (*self.inner.get()).write(inner) };
            self.made.set(true);
        }
    }

    /// # Safety
    /// [`Self::is_made`]; only the owner of the ring may call, and only one result may be in use.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "the ring's owner word is the lock")]
    pub(crate) unsafe fn borrow(&self) -> &mut Inner {
        // SAFETY: the caller's promise.
        unsafe { (*self.inner.get()).assume_init_mut() }
    }
}

/// One [`Local`] a ring.
pub(crate) struct Locals(NonNull<Local>);

// SAFETY: each element is used by the owner of its ring alone; see `Guard::enter`.
unsafe impl Sync for Locals {}
// SAFETY: as above.
unsafe impl Send for Locals {}

impl Locals {
    /// What it takes, in address space.
    pub(crate) const SIZE: usize = RING_COUNT * size_of::<Local>();

    /// `None` when the kernel gives no memory, or cannot wipe it on fork (before Linux 4.14).
    pub(crate) fn new() -> Option<Locals> {
        wiped_on_fork(Locals::SIZE).map(|memory| Locals(memory.cast()))
    }

    /// What belongs to ring `index`.
    pub(crate) fn get(&self, index: usize) -> Option<&Local> {
        // SAFETY: below the count that was mapped, zeroed, which is a valid value, and never unmapped.
        (index < RING_COUNT).then(|| unsafe { self.0.add(index).as_ref() })
    }
}

/// Zeroed pages that read zero in every forked child until they are written there. Never given back.
pub(crate) fn wiped_on_fork(bytes: usize) -> Option<NonNull<u8>> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
    let pages = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if pages == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: our own pages.
    if unsafe { libc::madvise(pages, bytes, libc::MADV_WIPEONFORK) } != 0 {
        // SAFETY: as above; nobody has seen them.
        unsafe { libc::munmap(pages, bytes) };
        return None;
    }
    NonNull::new(pages.cast())
}
