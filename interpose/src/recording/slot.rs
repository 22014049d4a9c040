//! Where a feature keeps the state that belongs to one recording.

use std::sync::atomic::{AtomicPtr, Ordering};

/// A feature's state for this process's recording. Empty before the first one starts.
///
/// A forked child that starts a recording of its own replaces the state. Until then the slot has its parent's. So read
/// it only with a [`Guard`](super::guard::Guard) or after
/// [`Process::if_started`](super::process::Process::if_started).
pub(crate) struct Slot<T: 'static>(AtomicPtr<T>);

impl<T: Send + Sync> Slot<T> {
    /// An empty slot.
    pub(crate) const fn new() -> Slot<T> {
        Slot(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// The state. `None` before the first recording.
    #[inline(always)]
    pub(crate) fn get(&self) -> Option<&'static T> {
        // SAFETY: the pointer is null or comes from `set`, which leaks its box. `T` may be shared between threads.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// Sets the state of a recording that is starting. The state before is never freed, because hooks on other threads
    /// may use it at any time.
    pub(crate) fn set(&self, state: T) {
        self.0.store(Box::into_raw(Box::new(state)), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_recording_replaces_the_state() {
        static SLOT: Slot<u32> = Slot::new();
        assert_eq!(SLOT.get(), None);
        SLOT.set(1);
        let parent = SLOT.get();
        SLOT.set(2);
        assert_eq!((parent, SLOT.get()), (Some(&1), Some(&2)));
    }
}
