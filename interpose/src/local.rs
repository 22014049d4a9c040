//! What a thread has for itself: the writing end of its ring and its stack cache, kept beside the ring and handed on
//! with it when the thread is gone. Nothing here has a destructor, so threads may end in any way.

use std::cell::UnsafeCell;

use memtrace_trace::shm::ring::{Producer, Ring};

use crate::stack::ThreadStacks;

/// The part of a thread's state that outlives it.
pub(crate) struct Local {
    inner: UnsafeCell<Option<Inner>>,
}

/// See [`Local`].
pub(crate) struct Inner {
    /// The ring's writing end.
    pub(crate) producer: Producer<'static>,
    /// The last walk.
    pub(crate) stacks: ThreadStacks,
}

// SAFETY: the ring's `owner` word says which thread may use it, see `Guard::enter`.
unsafe impl Sync for Local {}
// SAFETY: as above.
unsafe impl Send for Local {}

impl Local {
    pub(crate) const fn new() -> Local {
        Local { inner: UnsafeCell::new(None) }
    }

    /// What belongs to the ring; made when it is first claimed.
    ///
    /// # Safety
    /// Only the owner of the ring may call, and no reference from before may be in use.
    pub(crate) unsafe fn claim(&self, ring: Ring<'static>) -> *mut Inner {
        // SAFETY: the caller's promise.
        let inner = unsafe { &mut *self.inner.get() };
        inner.get_or_insert_with(|| Inner { producer: Producer::new(ring), stacks: ThreadStacks::new() })
    }
}
