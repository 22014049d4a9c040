//! The totals of an allocator at one point in time.

use crate::summary::Totals;
use memtrace_replay::Usage;

pub(crate) fn totals(usage: &Usage) -> Totals {
    Totals {
        allocated_bytes: usage.allocated,
        active_bytes: usage.active,
        reserved_bytes: usage.reserved,
        requested_bytes: usage.requested,
    }
}
