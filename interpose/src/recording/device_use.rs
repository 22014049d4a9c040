//! Whether this process uses a GPU. CPU tensors are then not recorded, unless the options request it.
//!
//! Belongs to the loaded library and is inherited by forked children, so that the workers of a GPU program do not
//! record CPU tensors either.

use std::sync::atomic::{AtomicBool, Ordering};

static IS_IN_USE: AtomicBool = AtomicBool::new(false);

/// Reports that a CUDA device is in use.
pub(crate) fn set() {
    IS_IN_USE.store(true, Ordering::Relaxed);
}

/// Whether a CUDA device is in use.
pub(crate) fn is_in_use() -> bool {
    IS_IN_USE.load(Ordering::Relaxed)
}
