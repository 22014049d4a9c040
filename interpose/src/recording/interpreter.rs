//! The Python interpreter of this process, once one is found.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use memtrace_stackwalk::Python;

/// The search for the interpreter, and its result.
pub(crate) struct InterpreterSearch {
    found: AtomicPtr<Python>,
    /// How many searches have found no interpreter. Determines when to search again.
    failed: AtomicU64,
    is_reported: AtomicU32,
}

impl InterpreterSearch {
    pub(super) fn new() -> InterpreterSearch {
        InterpreterSearch {
            found: AtomicPtr::new(std::ptr::null_mut()),
            failed: AtomicU64::new(0),
            is_reported: AtomicU32::new(0),
        }
    }

    /// The interpreter. `None` if there is none.
    #[inline]
    pub(super) fn python(&self) -> Option<&Python> {
        let python = self.found.load(Ordering::Acquire);
        // SAFETY: the pointer is null or comes from `set`, which leaks its box.
        unsafe { python.as_ref() }
    }

    /// Whether to search for an interpreter now: at the 1st, 2nd, 4th, 8th ... event without one.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.failed.fetch_add(1, Ordering::Relaxed).wrapping_add(1).is_power_of_two()
    }

    /// Ends all searches. The counter then never again reaches a power of two.
    pub(super) fn stop(&self) {
        self.failed.store(1 << 63 | 1, Ordering::Relaxed);
    }

    /// Whether the result of the interpreter's verification has been reported.
    #[inline]
    pub(super) fn is_reported(&self) -> bool {
        self.is_reported.load(Ordering::Relaxed) != 0
    }

    /// Marks the result as reported. Returns `true` for the one caller that does so.
    pub(super) fn set_reported(&self) -> bool {
        self.is_reported.swap(1, Ordering::Relaxed) == 0
    }

    /// Sets the interpreter, for the rest of the process's life.
    pub(super) fn set(&self, python: Python) {
        self.found.store(Box::into_raw(Box::new(python)), Ordering::Release);
    }
}
