//! The loaded objects that this recording has defined as modules.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::linker::mapped_object::MAX_MODULES;

/// The modules that this recording has defined, one bit each.
pub(super) struct DefinedModules([AtomicU64; MAX_MODULES / 64]);

impl DefinedModules {
    pub(super) const fn new() -> DefinedModules {
        DefinedModules([const { AtomicU64::new(0) }; MAX_MODULES / 64])
    }

    /// Marks the module with this index as defined. Returns `true` for the one caller that does so.
    pub(super) fn mark_defined(&self, index: usize) -> bool {
        let bit = 1 << (index % 64);
        self.0.get(index / 64).is_some_and(|word| {
            word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
        })
    }
}
