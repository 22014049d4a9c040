//! What is counted in the traced process. Every count reaches every report: nothing is lost in silence.

macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident = $index:literal $name:literal;)*) => {
        /// A count kept in the shared segment's header, by index.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u8)]
        pub enum Counter {
            $($(#[$doc])* $variant = $index,)*
        }

        impl Counter {
            /// Every counter.
            pub const ALL: &'static [Counter] = &[$(Counter::$variant),*];

            /// The name in `summary.json` and `run.json`.
            pub const fn name(self) -> &'static str {
                match self { $(Counter::$variant => $name,)* }
            }

            /// Whether it counts what a recording lacks. The others tell of time and of ways: nothing is missing.
            pub const fn is_loss(self) -> bool {
                !matches!(
                    self,
                    Counter::RingWaits
                        | Counter::RingWaitMicroseconds
                        | Counter::SharedRingEvents
                        | Counter::UnwindChecks
                        | Counter::NamesMicroseconds
                )
            }

            /// The counter with this index.
            pub const fn from_index(index: usize) -> Option<Counter> {
                match index { $($index => Some(Counter::$variant),)* _ => None }
            }
        }
    };
}

/// Room for counters in the segment header; a trace file may hold fewer or more.
pub const COUNTER_SLOTS: usize = 64;

counters! {
    /// Events that did not fit into a ring although the hook waited.
    EventsDropped = 0 "events_dropped";
    /// Definitions (stacks, names) that did not fit into a ring.
    DefinitionsDropped = 1 "definitions_dropped";
    /// Panics inside a hook; the original was called all the same.
    Panics = 2 "panics";
    /// Strings cut at the length limit.
    StringsCut = 3 "strings_cut";
    /// Stacks cut at the depth limit or by a full table.
    StacksCut = 4 "stacks_cut";
    /// Backward nodes whose forward stack had been overwritten.
    ForwardStacksLost = 5 "forward_stacks_lost";
    /// Allocator actions of a number we do not know.
    UnknownActions = 6 "unknown_actions";
    /// Threads that found no ring and shared the common one.
    SharedRingEvents = 7 "shared_ring_events";
    /// Times a hook waited for room in a ring. For how long says [`Counter::RingWaitMicroseconds`].
    RingWaits = 8 "ring_waits";
    /// Events seen while this thread was already inside a hook's own work.
    Reentered = 9 "reentered";
    /// CUDA calls whose original could not be found (they were answered with an error, as without us).
    OriginalsMissing = 10 "originals_missing";
    /// Driver entry points asked for under a version we do not wrap.
    UnwrappedEntryPoints = 11 "unwrapped_entry_points";
    /// Events of the reporter that disagree with the tracker.
    ReporterMismatches = 12 "reporter_mismatches";
    /// Native stacks that were compared with the C library's own unwinder (`--check-stacks`).
    UnwindChecks = 13 "unwind_checks";
    /// Those that differed.
    UnwindMismatches = 14 "unwind_mismatches";
    /// How long hooks waited for room in rings, all threads together.
    RingWaitMicroseconds = 15 "ring_wait_us";
    /// Ranges with a name (`record_function`, NVTX) that were not recorded: there are too many different names.
    LabelsDropped = 16 "labels_dropped";
    /// Looks at an `nn.Module` being called for which there was no room: it is known by its class, or as its caller.
    NnCallsCut = 17 "nn_calls_cut";
    /// Names of tensors and modules that were not told, for there are too many.
    NamesCut = 18 "names_cut";
    /// Reference cycles that are not shown (`--cycles`): there are too many different ones, or too large ones, or their file could not be written.
    CyclesNotShown = 19 "cycles_not_shown";
    /// How long the program's interpreter was held up by looks for names of tensors and modules.
    NamesMicroseconds = 20 "names_us";
}

/// A snapshot of all counters of one process.
pub type CounterValues = [u64; COUNTER_SLOTS];
