//! The input of all analysis: the events of one process, and the definitions that their ids refer to.
//!
//! A recording can be streamed any number of times, block by block in order. No caller holds all events at once.

use memtrace_trace::clock::{Calibration, ClockPoint};
use memtrace_trace::counters::Counter;
use memtrace_trace::event::Event;
use memtrace_trace::file::{Damage, Definitions, End, EventCounts, LostBlock};

use crate::compile_contexts::CompileContexts;
use crate::kept_state::KeptState;

/// The events that one pass over a recording could not deliver.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LostEvents {
    /// The number of blocks that could not be decoded.
    pub blocks: u64,
    /// The number of events in these blocks.
    pub events: u64,
    /// The error in the first block.
    pub first_error: Option<String>,
}

impl LostEvents {
    /// Counts a lost block.
    pub fn add(&mut self, block: &LostBlock) {
        self.blocks += 1;
        self.events += u64::from(block.events);
        self.first_error.get_or_insert_with(|| format!("block at byte {}: {}", block.offset, block.why));
    }

    /// Adds the losses of a later part.
    pub fn append(&mut self, later: LostEvents) {
        self.blocks += later.blocks;
        self.events += later.events;
        self.first_error = self.first_error.take().or(later.first_error);
    }
}

/// The events of one process, and the definitions that their ids refer to.
pub trait Recording: Send + Sync {
    /// The definitions: frames, stacks, contexts and others.
    fn definitions(&self) -> &Definitions;
    /// The conversion from clock ticks to time.
    fn calibration(&self) -> Calibration;
    /// The last value of a counter.
    fn counter(&self, counter: Counter) -> u64;
    /// How the recording ended; `None` if the recorder was cut off.
    fn end(&self) -> Option<&End>;
    /// The parts that could not be read when the file was indexed.
    fn damage(&self) -> Damage;
    /// A JSON object about the process, or an empty text.
    fn info(&self) -> &str;
    /// The expected number of events.
    fn event_count(&self) -> u64;
    /// The number of events that were not recorded but derived: they describe the state before the recording or at its
    /// end.
    fn derived_events(&self) -> u64 {
        0
    }
    /// The compile contexts of the events. Only PyTorch's snapshots have them.
    fn compile_contexts(&self) -> &CompileContexts {
        CompileContexts::EMPTY
    }
    /// The state at the first kept event of a rotated trace. `None` if it is unknown, and in other recordings.
    fn kept_state(&self) -> Option<&KeptState> {
        None
    }
    /// Passes every block of events to `sink`, in order. Returns what could not be delivered.
    fn stream(&self, sink: &mut dyn FnMut(&[Event])) -> LostEvents;
    /// Counts the events by kind. The result equals that of streaming all events; implementations can be faster.
    fn event_counts(&self) -> (EventCounts, LostEvents) {
        let mut event_counts = EventCounts::default();
        let lost = self.stream(&mut |events| events.iter().for_each(|e| event_counts.count(e)));
        (event_counts, lost)
    }
}

/// A recording in memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryRecording {
    /// The definitions.
    pub definitions: Definitions,
    /// The events, in order of `seq`.
    pub events: Vec<Event>,
    /// The clock points. With fewer than two of them, a tick is a nanosecond.
    pub clock: Vec<ClockPoint>,
    /// How the recording ended.
    pub end: Option<End>,
    /// A JSON object about the process.
    pub info: String,
}

impl Recording for MemoryRecording {
    fn definitions(&self) -> &Definitions {
        &self.definitions
    }

    fn calibration(&self) -> Calibration {
        Calibration::new(&self.clock)
    }

    fn counter(&self, _: Counter) -> u64 {
        0
    }

    fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    fn damage(&self) -> Damage {
        Damage::default()
    }

    fn info(&self) -> &str {
        &self.info
    }

    fn event_count(&self) -> u64 {
        self.events.len() as u64
    }

    fn stream(&self, sink: &mut dyn FnMut(&[Event])) -> LostEvents {
        for block in self.events.chunks(16 * 1024) {
            sink(block);
        }
        LostEvents::default()
    }
}
