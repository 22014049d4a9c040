//! What everything is worked out from: the events of one process and what their numbers mean.
//!
//! A recording can be streamed any number of times, block by block in order; nobody gets to hold all events at once.

use memtrace_trace::clock::{Calibration, ClockPoint};
use memtrace_trace::counters::Counter;
use memtrace_trace::event::Event;
use memtrace_trace::file::{Census, Damage, Definitions, End, LostBlock};

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

impl LostEvents {
    /// Takes note of a block.
    pub fn add(&mut self, block: &LostBlock) {
        self.blocks += 1;
        self.events += u64::from(block.events);
        self.first.get_or_insert_with(|| format!("block at byte {}: {}", block.offset, block.why));
    }

    /// Takes over what was lost of a later part.
    pub fn append(&mut self, later: LostEvents) {
        self.blocks += later.blocks;
        self.events += later.events;
        self.first = self.first.take().or(later.first);
    }
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
    /// Those of them that nobody recorded: they say what was there before, or at the end.
    fn added_events(&self) -> u64 {
        0
    }
    /// Hands every block of events to `sink`, in order.
    fn stream(&self, sink: &mut dyn FnMut(&[Event])) -> LostEvents;
    /// What kinds of events there are: the same as counting what is streamed, where that can be had for less.
    fn census(&self) -> (Census, LostEvents) {
        let mut census = Census::default();
        let lost = self.stream(&mut |events| events.iter().for_each(|e| census.count(e)));
        (census, lost)
    }
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
