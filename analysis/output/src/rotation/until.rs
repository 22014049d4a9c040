//! The part of a recording before one event.

use memtrace_input::load::TraceRecording;
use memtrace_input::{LostEvents, Recording};
use memtrace_trace::clock::Calibration;
use memtrace_trace::counters::Counter;
use memtrace_trace::event::Event;
use memtrace_trace::file::{Damage, Definitions, End};

/// Where the kept events begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    /// `seq` of the first kept event.
    pub(super) first_seq: u64,
    /// The block of the file that has it.
    pub(super) block: usize,
}

/// The events before a cut.
pub(super) struct Until<'a> {
    pub(super) recording: &'a TraceRecording,
    pub(super) cut: Cut,
    /// Whether to give up: the events then end early.
    pub(super) stops: &'a (dyn Fn() -> bool + Sync),
}

impl Until<'_> {
    /// The events of the block with the cut: those before it, and the rest.
    pub(super) fn split<'e>(&self, events: &'e [Event]) -> (&'e [Event], &'e [Event]) {
        events.split_at(events.iter().position(|e| e.seq >= self.cut.first_seq).unwrap_or(events.len()))
    }
}

impl Recording for Until<'_> {
    fn definitions(&self) -> &Definitions {
        self.recording.definitions()
    }

    fn calibration(&self) -> Calibration {
        self.recording.calibration()
    }

    fn counter(&self, counter: Counter) -> u64 {
        self.recording.counter(counter)
    }

    fn end(&self) -> Option<&End> {
        None
    }

    fn damage(&self) -> Damage {
        self.recording.damage()
    }

    fn info(&self) -> &str {
        self.recording.info()
    }

    fn event_count(&self) -> u64 {
        let blocks = self.recording.reader().blocks();
        blocks.iter().take(self.cut.block).map(|block| u64::from(block.events)).sum()
    }

    fn stream(&self, sink: &mut dyn FnMut(&[Event])) -> LostEvents {
        let (mut lost, mut events) = (LostEvents::default(), Vec::new());
        let reader = self.recording.reader();
        let mut decoder = reader.decoder();
        for (at, block) in reader.blocks().iter().enumerate().take(self.cut.block + 1) {
            if (self.stops)() {
                break;
            }
            match decoder.decode(block, &mut events) {
                Ok(()) if at == self.cut.block => sink(self.split(&events).0),
                Ok(()) => sink(&events),
                Err(block) => lost.add(&block),
            }
        }
        lost
    }
}
