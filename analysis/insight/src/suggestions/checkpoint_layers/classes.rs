//! The classes whose modules are checkpointed: when they are considered, and the calls of their modules.

use std::collections::BTreeSet;

use crate::suggestions::facts::Facts;
use crate::suggestions::recorded::calls::Members;

/// Checkpointed modules are worth a replay if they hold at least 5 % (1/20) of the peak.
pub(super) const WORTH_CHECKPOINTING: u64 = 20;
/// The minimum number of modules that are checkpointed.
pub(super) const MIN_MODULES: usize = 2;
/// The maximum number of classes whose checkpointing is replayed.
pub(super) const MAX_CLASSES: usize = 8;
/// Among classes whose checkpointing leads to peaks within 3.03 % (1/33), the one with the fewest modules counts.
pub(super) const SAME_PEAK: u64 = 33;

/// The modules of these classes.
pub(super) fn members(facts: &Facts<'_>, classes: &BTreeSet<Box<str>>) -> Members {
    Members::repeated(&facts.recorded, &classes.iter().map(|class| &**class).collect())
}
