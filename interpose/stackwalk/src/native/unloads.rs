//! Detects that an object is unloaded, after which its addresses may have another meaning.
//!
//! The `dlclose` hook calls this module before and after the original. Meanwhile no cached fact about addresses is
//! used, because another thread may already be loading an object into the freed range. *Loading* an object needs no
//! notice, because nothing was cached for its addresses before.
//!
//! Two cases are not detected. One is an object that the C library itself unloads (a character set converter). The
//! other is generated code that is replaced by other code.

use std::sync::atomic::{
    AtomicU32,
    Ordering::{AcqRel, Acquire, Release},
};

static UNLOADING: AtomicU32 = AtomicU32::new(0);
static UNLOADS: AtomicU32 = AtomicU32::new(0);

/// How many times objects were unloaded. `None` while one is being unloaded.
#[inline]
pub(super) fn count() -> Option<u32> {
    // The count is read last, so a reader that sees the end of an unload also sees it counted.
    (UNLOADING.load(Acquire) == 0).then(|| UNLOADS.load(Acquire))
}

/// Reports that `dlclose` is about to run.
pub fn begin() {
    UNLOADING.fetch_add(1, AcqRel);
}

/// Reports that `dlclose` has returned. `unloaded` says whether the loader has unloaded anything.
pub fn end(unloaded: bool) {
    if unloaded {
        UNLOADS.fetch_add(1, AcqRel);
    }
    UNLOADING.fetch_sub(1, Release);
}
