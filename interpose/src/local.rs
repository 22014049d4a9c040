//! What a thread has for itself: the writing end of its ring and its stack cache, kept beside the ring and handed on
//! with it when the thread is gone. Nothing here has a destructor, so threads may end in any way.

use std::cell::UnsafeCell;

use memtrace_trace::shm::ring::Producer;

use crate::stack::ThreadStacks;

/// The part of a thread's state that outlives it.
pub(crate) struct Local {
    inner: UnsafeCell<Inner>,
}

/// See [`Local`].
pub(crate) struct Inner {
    /// The ring's writing end; made when the ring is first claimed.
    pub(crate) producer: Option<Producer<'static>>,
    /// The last walk.
    pub(crate) stacks: ThreadStacks,
}

// SAFETY: the ring's `owner` word says which thread may use it, see `Guard::enter`.
unsafe impl Sync for Local {}
// SAFETY: as above.
unsafe impl Send for Local {}

impl Local {
    pub(crate) const fn new() -> Local {
        Local { inner: UnsafeCell::new(Inner { producer: None, stacks: ThreadStacks::new() }) }
    }

    /// # Safety
    /// Only the owner of the ring may call, and only one result may be alive.
    #[allow(clippy::mut_from_ref, reason = "the ring's owner word is the lock")]
    pub(crate) unsafe fn get(&self) -> &mut Inner {
        // SAFETY: the caller's promise.
        unsafe { &mut *self.inner.get() }
    }
}
