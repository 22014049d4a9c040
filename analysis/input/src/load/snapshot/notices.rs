//! Notices that count what a snapshot omits, and what in it could not be used.

use memtrace_trace::definition::NoticeStatus;
use memtrace_trace::file::Notice;

/// Counts made while reading.
#[derive(Clone, Debug, Default)]
pub(super) struct ReadStatistics {
    /// Whether the file is complete.
    pub(super) is_complete: bool,
    /// Texts that were cut because of their length.
    pub(super) cut_texts: u64,
    pub(super) events: EventStatistics,
    pub(super) before: BeforeEvents,
    /// Blocks that were allocated after the events had been captured and before the state was.
    pub(super) after_blocks: u64,
    pub(super) no_times: bool,
    pub(super) has_state: bool,
    /// Devices with segments but without events.
    pub(super) devices_without_events: Vec<i64>,
    /// Segments and events of pinned host memory.
    pub(super) pinned_host_memory: [u64; 2],
    pub(super) ignored: IgnoredParts,
}

/// The events of all devices.
#[derive(Clone, Debug, Default)]
pub(super) struct EventStatistics {
    pub(super) all: u64,
    pub(super) allocations: u64,
    pub(super) without_stack: u64,
    /// Of those without a stack: the allocations of blocks whose stack the state at the end has.
    pub(super) stacks_of_state: u64,
    /// Of the frees of allocations in the recording: those with the allocation's stack, and all that have a stack.
    pub(super) frees_of_allocation: u64,
    pub(super) frees_with_stack: u64,
}

/// The blocks that are older than the first event.
#[derive(Clone, Debug, Default)]
pub(super) struct BeforeEvents {
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    pub(super) segments: u64,
    /// Blocks of which only the free is known.
    pub(super) known_by_free: u64,
}

/// The parts of the file that were not read.
#[derive(Clone, Debug, Default)]
pub(super) struct IgnoredParts {
    pub(super) malformed_events: u64,
    pub(super) malformed_segments: u64,
    pub(super) malformed_times: u64,
    /// Bytes after the snapshot's end.
    pub(super) trailing_bytes: u64,
    pub(super) unknown_actions: Vec<(String, u64)>,
    /// Lists of events that occur more than once.
    pub(super) repeated_traces: u64,
    /// Events and segments of private pools without an id.
    pub(super) excess_pools: u64,
}

/// The topic of the notices about what a snapshot omits.
pub const TOPIC: &str = "snapshot";

impl ReadStatistics {
    /// The notices, most important first.
    pub(super) fn notices(&self) -> Vec<Notice> {
        let mut notices = Vec::new();
        let mut add = |text: String| {
            notices.push(Notice { topic: TOPIC.into(), text: text.into(), status: NoticeStatus::Remark });
        };
        if self.events.all == 0 {
            add("the snapshot contains no events, only the state at its end; call \
                 torch.cuda.memory._record_memory_history() before the allocations"
                .into());
        } else if self.before.blocks + self.before.segments > 0 {
            add(format!(
                "{} blocks ({} bytes) and {} segments are older than its first event: the recording started after \
                 their allocation, or its ring buffer (max_entries) overwrote it; {} of these blocks are known only by \
                 their free",
                self.before.blocks, self.before.bytes, self.before.segments, self.before.known_by_free
            ));
        }
        let events = &self.events;
        let without_stack = events.without_stack - events.stacks_of_state;
        if without_stack > 0 {
            let reason = match events.without_stack == events.allocations {
                true if events.stacks_of_state > 0 => {
                    "only blocks in use at the end have one (context=\"state\"; \"alloc\" records all)"
                }
                true => "the snapshot was recorded without stacks",
                false => "backward threads run no Python code",
            };
            add(format!("{without_stack} of {} allocations have no stack: {reason}", events.allocations));
        }
        if self.events.frees_with_stack > 0 && self.events.frees_of_allocation == self.events.frees_with_stack {
            add(format!(
                "all {} frees have the stack of their allocation, not their own (context=\"alloc\")",
                self.events.frees_with_stack
            ));
        }
        if self.no_times {
            add("events have no timestamps (PyTorch before 2.2): durations are unknown, and devices are listed one \
                 after another"
                .into());
        }
        if !self.has_state && self.is_complete {
            add("the snapshot contains no segments: the final state is derived from the events".into());
        }
        if !self.devices_without_events.is_empty() {
            let devices: Vec<String> = self.devices_without_events.iter().take(8).map(i64::to_string).collect();
            add(format!("device {} has no events, only a final state", devices.join(", ")));
        }
        if self.after_blocks > 0 {
            add(format!(
                "{} blocks were allocated after the last event and before the final state was captured",
                self.after_blocks
            ));
        }
        if self.pinned_host_memory != [0; 2] {
            let [segments, events] = self.pinned_host_memory;
            add(format!("{segments} segments and {events} events of pinned host memory are not reported"));
        }
        for (name, count) in self.ignored.unknown_actions.iter().take(8) {
            add(format!("{count} events have an unknown action: {name}"));
        }
        for (count, what) in [
            (self.ignored.malformed_events, "events are invalid: no action, no address or an impossible size"),
            (self.ignored.malformed_segments, "segments and blocks are invalid: no address or an impossible size"),
            (self.ignored.malformed_times, "events have an impossible time and get the time of the event before"),
            (self.ignored.trailing_bytes, "bytes after the end of the snapshot are not read"),
            (self.ignored.repeated_traces, "lists of events occur again and are read once"),
            (self.ignored.excess_pools, "events and segments belong to private pools beyond the supported 65,535"),
            (self.cut_texts, "texts of more than 64 KiB are cut"),
        ] {
            if count > 0 {
                add(format!("{count} {what}"));
            }
        }
        add("a snapshot omits the command, its exit status, threads, the grad mode, autograd nodes, and memory outside \
             PyTorch's caching allocator"
            .into());
        notices
    }
}
