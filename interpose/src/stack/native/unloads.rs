//! Notices when an object is unloaded: from then on its addresses may mean something else.
//!
//! The `dlclose` hook reports here, before and after the original runs. While one runs nothing that is remembered about
//! addresses is used, as another thread may already be loading into the gap. Objects that are *loaded* need no notice: they lie
//! where nothing was known before. Not noticed: an object that the C library itself unloads (a character set converter),
//! and generated code that gives way to other code.

use std::sync::atomic::{
    AtomicU32,
    Ordering::{AcqRel, Acquire, Release},
};

static UNLOADING: AtomicU32 = AtomicU32::new(0);
static UNLOADS: AtomicU32 = AtomicU32::new(0);

/// How many times objects were unloaded; `None` while one is being unloaded.
#[inline]
pub(super) fn count() -> Option<u32> {
    // The count is read last: whoever sees the end of an unload sees it counted.
    (UNLOADING.load(Acquire) == 0).then(|| UNLOADS.load(Acquire))
}

/// `dlclose` is about to run.
pub(crate) fn begin() {
    UNLOADING.fetch_add(1, AcqRel);
}

/// `dlclose` has returned. `unloaded`: whether the loader has unloaded anything.
pub(crate) fn end(unloaded: bool) {
    if unloaded {
        UNLOADS.fetch_add(1, AcqRel);
    }
    UNLOADING.fetch_sub(1, Release);
}
