//! Counters of the traced process. Every count reaches every report, so that no loss is silent.

use crate::named;

/// How many counters fit into the segment header. A trace file may contain fewer or more.
pub const COUNTER_SLOTS: usize = 64;

named! {
    /// A counter in the shared segment's header, identified by its index. The names are those in `summary.json` and
    /// `run.json`.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    pub enum Counter {
        /// Events that were dropped because a ring stayed full although the hook waited.
        EventsDropped = 0 => "events_dropped",
        /// Definitions (stacks, names) that were dropped because a ring stayed full.
        DefinitionsDropped = 1 => "definitions_dropped",
        /// Panics inside a hook. The original function was called all the same.
        Panics = 2 => "panics",
        /// Strings that were cut at the length limit.
        StringsTruncated = 3 => "strings_truncated",
        /// Stacks that were cut at the depth limit or because a table was full.
        StacksTruncated = 4 => "stacks_truncated",
        /// Backward nodes whose forward stack had been overwritten.
        ForwardStacksLost = 5 => "forward_stacks_lost",
        /// Allocator actions with an unknown number.
        UnknownActions = 6 => "unknown_actions",
        /// How often a thread without a ring of its own used the common ring.
        SharedRingEvents = 7 => "shared_ring_events",
        /// How often a hook waited for space in a ring. [`Counter::RingWaitMicroseconds`] is the total time.
        RingWaits = 8 => "ring_waits",
        /// Events that occurred while the thread was already recording another one.
        Reentered = 9 => "reentered",
        /// CUDA calls whose original could not be found. They returned an error, as without memtrace.
        OriginalsMissing = 10 => "originals_missing",
        /// Driver entry points that were requested in a version without a hook.
        UnwrappedEntryPoints = 11 => "unwrapped_entry_points",
        /// Reports of the profiler's reporter that disagree with the tracker.
        ReporterMismatches = 12 => "reporter_mismatches",
        /// The total time that hooks of all threads waited for space in rings, in microseconds.
        RingWaitMicroseconds = 15 => "ring_wait_us",
        /// Named ranges (`record_function`, NVTX) that were not recorded, because there were too many different names.
        LabelsDropped = 16 => "labels_dropped",
        /// Lookups of `nn.Module` calls without space for a new call. The call is identified by its class, or as its
        /// caller.
        NnCallsMerged = 17 => "nn_calls_merged",
        /// Names of tensors and modules that were not reported, because there were too many.
        NamesDropped = 18 => "names_dropped",
        /// Reference cycles that are not shown (`--cycles`): too many different ones, too large ones, or their file
        /// could not be written.
        CyclesNotShown = 19 => "cycles_not_shown",
        /// How long scans for names of tensors and modules stopped the program's interpreter, in microseconds.
        NamesMicroseconds = 20 => "names_us",
        /// Searches for what holds tensors (`--holders`) that did not visit all objects, because there are too many,
        /// and tensors whose holder was not recorded.
        HoldersNotShown = 21 => "holders_not_shown",
        /// How long the searches for what holds tensors stopped the program's interpreter, in microseconds.
        HoldersMicroseconds = 22 => "holders_us",
        /// Allocations under a limit that did not get the lock of the run in time, and were made all the same.
        LimitLockMissed = 23 => "limit_lock_missed",
    }
}

impl Counter {
    /// Whether it counts something that a recording lacks. The others count time or occurrences without a loss.
    pub const fn is_loss(self) -> bool {
        !matches!(
            self,
            Counter::RingWaits
                | Counter::RingWaitMicroseconds
                | Counter::SharedRingEvents
                | Counter::NamesMicroseconds
                | Counter::HoldersMicroseconds
                | Counter::LimitLockMissed
        )
    }
}

/// Indices of former counters (`unwind_checks`, `unwind_mismatches`), which trace files may contain. No counter gets
/// them.
const RETIRED: [u64; 2] = [13, 14];

const _: () = assert!(Counter::from_wire(RETIRED[0]).is_none() && Counter::from_wire(RETIRED[1]).is_none());

/// The values of all counters of one process.
pub type CounterValues = [u64; COUNTER_SLOTS];
