//! Where events come from: a trace file, or memory (tests, and readers of other formats).
//!
//! A recording can be streamed any number of times, block by block in order; nobody gets to hold all events at once.

use std::path::Path;
use std::sync::mpsc::sync_channel;

use memtrace_trace::clock::{Calibration, ClockPoint};
use memtrace_trace::counters::Counter;
use memtrace_trace::event::Event;
use memtrace_trace::file::{Damage, Definitions, End, Reader};

use crate::error::{Error, Result};

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

/// Blocks decoded ahead of the one that is being worked on.
const DECODED_AHEAD: usize = 4;

/// A `.mtr` file.
#[derive(Debug)]
pub struct TraceRecording {
    reader: Reader,
    calibration: Calibration,
}

impl TraceRecording {
    /// Opens and surveys a trace file.
    pub fn open(path: &Path) -> Result<TraceRecording> {
        let reader = Reader::open(path).map_err(|source| Error::Trace { path: path.to_owned(), source })?;
        let calibration = reader.calibration();
        Ok(TraceRecording { reader, calibration })
    }
}

impl Recording for TraceRecording {
    fn definitions(&self) -> &Definitions {
        self.reader.definitions()
    }

    fn calibration(&self) -> Calibration {
        self.calibration
    }

    fn counter(&self, counter: Counter) -> u64 {
        self.reader.counter(counter)
    }

    fn end(&self) -> Option<&End> {
        self.reader.end()
    }

    fn damage(&self) -> Damage {
        *self.reader.damage()
    }

    fn info(&self) -> &str {
        self.reader.info()
    }

    fn event_count(&self) -> u64 {
        self.reader.event_count()
    }

    /// Decodes on a second thread, a few blocks ahead, so that decoding and replay share two cores.
    fn stream(&self, sink: &mut dyn FnMut(&[Event])) -> LostEvents {
        let mut lost = LostEvents::default();
        let (full, ready) = sync_channel(DECODED_AHEAD);
        let (empty, reuse) = sync_channel::<Vec<Event>>(DECODED_AHEAD + 2);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for block in self.reader.blocks() {
                    let mut events = reuse.try_recv().unwrap_or_default();
                    let decoded = self.reader.decode(block, &mut events).map(|()| events);
                    if full.send(decoded).is_err() {
                        return;
                    }
                }
            });
            for block in ready {
                match block {
                    Ok(events) => {
                        sink(&events);
                        // A full channel only means that this buffer is not needed again.
                        let _ = empty.try_send(events);
                    }
                    Err(block) => {
                        lost.blocks += 1;
                        lost.events += u64::from(block.events);
                        lost.first.get_or_insert_with(|| format!("block at byte {}: {}", block.offset, block.why));
                    }
                }
            }
        });
        lost
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
