//! A recording, or the part of it before one event.

use memtrace_input::load::TraceRecording;
use memtrace_input::{KeptState, LostEvents, Recording};
use memtrace_trace::clock::Calibration;
use memtrace_trace::counters::Counter;
use memtrace_trace::event::Event;
use memtrace_trace::file::{BlockInfo, Damage, Definitions, End, EventCounts};

/// Where the kept events begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    /// `seq` of the first kept event.
    pub(super) first_seq: u64,
    /// The block of the file that has it.
    pub(super) block: usize,
}

impl Cut {
    /// The events of the block with the cut: those before it, and the rest.
    pub(super) fn split<'e>(&self, events: &'e [Event]) -> (&'e [Event], &'e [Event]) {
        events.split_at(events.iter().position(|e| e.seq >= self.first_seq).unwrap_or(events.len()))
    }
}

/// The events before a cut, or all.
#[derive(Clone, Copy)]
pub(super) struct PartialRecording<'a> {
    pub(super) recording: &'a TraceRecording,
    pub(super) cut: Option<Cut>,
}

impl PartialRecording<'_> {
    /// The blocks with events of this part.
    fn blocks(&self) -> &[BlockInfo] {
        let blocks = self.recording.reader().blocks();
        self.cut.and_then(|cut| blocks.get(..=cut.block)).unwrap_or(blocks)
    }
}

impl Recording for PartialRecording<'_> {
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

    fn kept_state(&self) -> Option<&KeptState> {
        self.recording.kept_state()
    }

    fn event_count(&self) -> u64 {
        self.blocks().iter().map(|block| u64::from(block.events)).sum()
    }

    fn stream(&self, sink: &mut dyn FnMut(&[Event])) -> LostEvents {
        let (mut lost, mut events) = (LostEvents::default(), Vec::new());
        let mut decoder = self.recording.reader().decoder();
        for (at, block) in self.blocks().iter().enumerate() {
            match (decoder.decode(block, &mut events), self.cut) {
                (Ok(()), Some(cut)) if at == cut.block => sink(cut.split(&events).0),
                (Ok(()), _) => sink(&events),
                (Err(block), _) => lost.add(&block),
            }
        }
        lost
    }

    /// Without decoding the events. Only all of them are counted like this.
    fn event_counts(&self) -> (EventCounts, LostEvents) {
        let (mut counts, mut lost) = (EventCounts::default(), LostEvents::default());
        if self.cut.is_some() {
            lost = self.stream(&mut |events| events.iter().for_each(|e| counts.count(e)));
            return (counts, lost);
        }
        let mut decoder = self.recording.reader().decoder();
        for block in self.blocks() {
            if let Err(block) = decoder.count_events(block, &mut counts) {
                lost.add(&block);
            }
        }
        (counts, lost)
    }
}
