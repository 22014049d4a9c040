//! Reports what a snapshot cannot show, or did not, as sentences with counts.

use memtrace_trace::definition::Verdict;
use memtrace_trace::file::Notice;

/// What was found while reading.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// Whether the file is complete.
    pub(super) whole: bool,
    /// Texts that were cut because of their length.
    pub(super) cut_texts: u64,
    /// The number of events of all devices.
    pub(super) events: u64,
    pub(super) allocations: u64,
    pub(super) without_stack: u64,
    /// Of the frees of allocations in the recording: those with the allocation's stack, and all that have a stack.
    pub(super) frees_of_allocation: u64,
    pub(super) frees_with_stack: u64,
    /// Blocks, bytes and segments older than the first event, and blocks of which only the free is known.
    pub(super) before_blocks: u64,
    pub(super) before_bytes: u64,
    pub(super) before_segments: u64,
    pub(super) before_unseen: u64,
    /// Blocks that were allocated after the events had been captured and before the state was.
    pub(super) after_blocks: u64,
    pub(super) no_times: bool,
    pub(super) has_state: bool,
    /// Devices with segments but without events.
    pub(super) silent_devices: Vec<i64>,
    pub(super) host: [u64; 2],
    pub(super) malformed_events: u64,
    pub(super) malformed_segments: u64,
    pub(super) malformed_times: u64,
    /// Bytes after the snapshot's end.
    pub(super) trailing: u64,
    pub(super) unknown_actions: Vec<(String, u64)>,
    pub(super) repeated_traces: u64,
    pub(super) pools: u64,
    pub(super) compiled: u64,
}

/// The topic of the notices about what a snapshot cannot show, or did not.
pub const TOPIC: &str = "snapshot";

impl Facts {
    /// The sentences, most important first.
    pub(super) fn notices(&self) -> Vec<Notice> {
        let mut said = Vec::new();
        let mut say = |text: String| {
            said.push(Notice { topic: TOPIC.into(), text: text.into(), verdict: Verdict::Remark });
        };
        if self.events == 0 {
            say("it holds no events, only what was there when it was taken: record with torch.cuda.memory._record_memory_history()".into());
        } else if self.before_blocks + self.before_segments > 0 {
            say(format!(
                "{} blocks ({} bytes) and {} segments are older than its first event: the recording began after them, or its ring \
                 (max_entries) has overwritten how they came; of {} of the blocks only the free is known",
                self.before_blocks, self.before_bytes, self.before_segments, self.before_unseen
            ));
        }
        if self.allocations > 0 && self.without_stack > 0 {
            let which = if self.without_stack == self.allocations {
                "it was recorded without stacks"
            } else {
                "as in backward, whose threads run no Python"
            };
            say(format!("{} of {} allocations have no stack: {which}", self.without_stack, self.allocations));
        }
        if self.frees_with_stack > 0 && self.frees_of_allocation == self.frees_with_stack {
            say(format!(
                "no stacks of frees: all {} have that of their allocation (context=\"alloc\")",
                self.frees_with_stack
            ));
        }
        if self.no_times {
            say("its events have no times (PyTorch before 2.2): devices are told one after the other, and durations are unknown".into());
        }
        if !self.has_state && self.whole {
            say("it holds no segments: what was there at its end is known from the events alone".into());
        }
        if !self.silent_devices.is_empty() {
            let devices: Vec<String> = self.silent_devices.iter().take(8).map(i64::to_string).collect();
            say(format!("no events of device {}, of which it holds only the state at its end", devices.join(", ")));
        }
        if self.after_blocks > 0 {
            say(format!("{} blocks came after the last event and before its state was taken", self.after_blocks));
        }
        if self.host != [0; 2] {
            say(format!(
                "{} segments and {} events of page-locked host memory are not reported",
                self.host[0], self.host[1]
            ));
        }
        for (name, count) in self.unknown_actions.iter().take(8) {
            say(format!("{count} events of a kind that this memtrace does not know: {name}"));
        }
        for (count, what) in [
            (self.malformed_events, "events that are none, or without an action, an address or a possible size"),
            (self.malformed_segments, "segments and blocks that are none, or without an address or a possible size"),
            (self.malformed_times, "events at an impossible time: put beside the event before"),
            (self.trailing, "bytes behind the snapshot's end, not read"),
            (self.repeated_traces, "lists of events that stand there twice"),
            (self.pools, "events and segments of private pools beyond 65,535"),
            (self.cut_texts, "texts of more than 64 KiB, cut"),
        ] {
            if count > 0 {
                say(format!("{count} {what}"));
            }
        }
        if self.compiled > 0 {
            say(format!("{} events name what torch.compile compiled, which is not reported", self.compiled));
        }
        say("a snapshot does not tell the command, its exit, threads, the grad mode, autograd's nodes, nor memory outside PyTorch's allocator".into());
        said
    }
}
