//! A trace file as a recording.

use std::path::Path;
use std::sync::mpsc::sync_channel;

use memtrace_trace::clock::Calibration;
use memtrace_trace::counters::Counter;
use memtrace_trace::event::Event;
use memtrace_trace::file::{Damage, Definitions, End, Reader};

use crate::error::{Error, Result};
use crate::model::{LostEvents, Recording};

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
        let reader = Reader::open(path).map_err(|cause| Error::Trace { path: path.to_owned(), cause })?;
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
