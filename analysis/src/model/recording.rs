//! What everything is worked out from: the events of one process and what their numbers mean.
//!
//! A recording can be streamed any number of times, block by block in order; nobody gets to hold all events at once.

use memtrace_trace::clock::{Calibration, ClockPoint};
use memtrace_trace::counters::Counter;
use memtrace_trace::event::Event;
use memtrace_trace::file::{Damage, Definitions, End};

/// What one streaming of a recording could not deliver.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LostEvents {
    /// Blocks that could not be decoded.
    pub blocks: u64,
    /// Events in them.
    pub events: u64,
    /// What is wrong with the first.
    pub first: Option<String>,
}

/// The events of one process and what their numbers mean.
pub trait Recording: Send + Sync {
    /// The tables of frames, stacks, contexts, ...
    fn definitions(&self) -> &Definitions;
    /// Ticks to time.
    fn calibration(&self) -> Calibration;
    /// A counter's last value.
    fn counter(&self, counter: Counter) -> u64;
    /// How the recording ended; `None` when the recorder was cut off.
    fn end(&self) -> Option<&End>;
    /// What the survey could not read.
    fn damage(&self) -> Damage;
    /// One JSON object about the process, or nothing.
    fn info(&self) -> &str;
    /// Events there should be.
    fn event_count(&self) -> u64;
    /// Hands every block of events to `sink`, in order.
    fn stream(&self, sink: &mut dyn FnMut(&[Event])) -> LostEvents;
}

/// Events in memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryRecording {
    /// The tables.
    pub definitions: Definitions,
    /// The events, in order of `seq`.
    pub events: Vec<Event>,
    /// Clock points; without two of them a tick is a nanosecond.
    pub clock: Vec<ClockPoint>,
    /// How it ended.
    pub end: Option<End>,
    /// JSON about the process.
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
