//! The call sites that step an optimizer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// At most this many optimizers are distinguished by the call site of `step()`.
const MAX_STEP_SITES: usize = 64;

/// The sites seen so far. A new one counts as a change of the program.
pub(super) struct StepSites {
    /// Hashes of label and stack, one for each site. 0 is a free slot.
    sites: [AtomicU64; MAX_STEP_SITES],
    has_new: AtomicBool,
}

impl StepSites {
    pub(super) const fn new() -> StepSites {
        StepSites { sites: [const { AtomicU64::new(0) }; MAX_STEP_SITES], has_new: AtomicBool::new(false) }
    }

    /// Adds a site, identified by a hash of the optimizer's label and stack.
    pub(super) fn add(&self, site: u64) {
        let site = site | 1;
        for slot in &self.sites {
            match slot.compare_exchange(0, site, Ordering::Relaxed, Ordering::Relaxed) {
                // Release, with the Acquire below: whoever takes the flag sees the site.
                Ok(_) => return self.has_new.store(true, Ordering::Release),
                Err(known) if known == site => return,
                Err(_) => {}
            }
        }
    }

    /// The number of sites, if there are new ones since the last call.
    pub(super) fn take_new(&self) -> Option<usize> {
        let count = || self.sites.iter().take_while(|site| site.load(Ordering::Relaxed) != 0).count();
        self.has_new.swap(false, Ordering::AcqRel).then(count)
    }
}
