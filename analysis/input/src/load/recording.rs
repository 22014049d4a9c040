//! A trace file as a recording.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::sync_channel;

use memtrace_trace::clock::Calibration;
use memtrace_trace::counters::Counter;
use memtrace_trace::event::Event;
use memtrace_trace::file::{BlockInfo, Budget, Damage, Definitions, End, EventCounts, Exceeded, Reader, untrusted};

use super::problem::Problem;
use crate::error::{Error, Result};
use crate::folder::RunFolder;
use crate::kept_state::KeptState;
use crate::packed_state::unpack;
use crate::recording::{LostEvents, Recording};
use crate::symbols::Symbols;

/// The maximum number of threads. Each has buffers for one block, which takes up to 32 MiB in a malicious file.
const MAX_THREADS: usize = 16;
/// The maximum number of blocks that are decoded ahead.
const MAX_BLOCKS_AHEAD: usize = 4;

/// A `.mtr` file.
#[derive(Debug)]
pub struct TraceRecording {
    reader: Reader,
    calibration: Calibration,
    threads: usize,
    kept_state: Option<KeptState>,
}

impl TraceRecording {
    /// Opens a trace file and indexes it.
    pub fn open(path: &Path) -> Result<TraceRecording> {
        Reader::open(path).map(TraceRecording::of).map_err(|cause| Error::Trace { path: path.to_owned(), cause })
    }

    /// [`Self::open`] for a file that is open already. `path` is for messages.
    pub fn of_file(path: &Path, file: File) -> Result<TraceRecording> {
        TraceRecording::read(path, file, &Budget::default())
    }

    /// The reader of the file.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// [`Self::open`] within the budget of a run.
    pub(super) fn open_within(path: &Path, budget: &Budget) -> Result<TraceRecording> {
        let file = untrusted::open(path).map_err(Error::io(format!("cannot open {}", path.display())))?;
        TraceRecording::read(path, file, budget)
    }

    /// Opens and indexes a trace in a run folder, within the budget of the run.
    pub(super) fn open_in(folder: &RunFolder, name: &OsStr, budget: &Budget) -> Result<TraceRecording> {
        let path = folder.path().join(name);
        let file = folder.open_file(name).map_err(Error::io(format!("cannot open {}", path.display())))?;
        TraceRecording::read(&path, file, budget)
    }

    fn read(path: &Path, file: File, budget: &Budget) -> Result<TraceRecording> {
        let reader = Reader::within(path, file, budget);
        reader.map(TraceRecording::of).map_err(|cause| Error::Trace { path: path.to_owned(), cause })
    }

    /// The limit that made the reader leave something out, and how many definitions and frames that are. `None` if
    /// nothing was left out.
    pub(super) fn exceeded(&self) -> Option<(Exceeded, u64)> {
        Some((self.reader.exceeded()?, self.reader.damage().over_budget))
    }

    fn of(reader: Reader) -> TraceRecording {
        let calibration = reader.calibration();
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        TraceRecording { reader, calibration, threads, kept_state: None }
    }

    /// Reads the state of a rotated trace: from its definitions, or from the file beside it, which `open` opens.
    pub fn read_kept_state(&mut self, open: impl FnOnce() -> io::Result<File>, budget: &Budget) -> io::Result<()> {
        let definitions = self.reader.definitions();
        let Some(rotation) = definitions.rotation else { return Ok(()) };
        self.kept_state = Some(match &definitions.packed_state {
            Some(packed) => unpack(packed, rotation).map_err(io::Error::other)?,
            None => KeptState::read(&open()?, &rotation, budget)?,
        });
        Ok(())
    }

    /// [`Self::read_kept_state`] of a trace with this name in a folder. The owner of the trace must be that of the
    /// file.
    pub(super) fn read_kept_state_in(
        &mut self,
        folder: Option<&RunFolder>,
        name: &Path,
        budget: &Budget,
    ) -> Result<(), Problem> {
        let name = KeptState::file_name(name);
        let owner = self.reader.file().metadata().map(|metadata| metadata.uid());
        let open = || folder.ok_or(io::ErrorKind::NotFound)?.open_file_of(&name, owner?);
        self.read_kept_state(open, budget).map_err(|e| Problem {
            path: folder.map_or(Path::new(""), RunFolder::path).join(&name),
            text: format!("{e}; steps and categories before the kept events are unknown"),
        })
    }

    /// Replaces native frames by functions, files and lines.
    pub(super) fn symbolize(&mut self, symbols: &Symbols, budget: &Budget) {
        symbols.symbolize(self.reader.definitions_mut(), budget);
    }

    /// Sets the number of threads, including the caller's, instead of one per core. The result does not depend on it.
    pub fn with_threads(mut self, threads: usize) -> TraceRecording {
        self.threads = threads.max(1);
        self
    }

    fn stream_on_one_thread(&self, sink: &mut dyn FnMut(&[Event])) -> LostEvents {
        let mut lost = LostEvents::default();
        let mut decoder = self.reader.decoder();
        let mut events = Vec::new();
        for block in self.reader.blocks() {
            match decoder.decode(block, &mut events) {
                Ok(()) => sink(&events),
                Err(block) => lost.add(&block),
            }
        }
        lost
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

    fn kept_state(&self) -> Option<&KeptState> {
        self.kept_state.as_ref()
    }

    fn derived_events(&self) -> u64 {
        self.reader.definitions().rotation.as_ref().map_or(0, |rotation| rotation.recreating)
    }

    /// Decodes on a second thread, a few blocks ahead, so that decoding and replay use two cores. More threads would
    /// only wait. Replay must go in order and takes longer than decoding.
    fn stream(&self, sink: &mut dyn FnMut(&[Event])) -> LostEvents {
        if self.threads == 1 {
            return self.stream_on_one_thread(sink);
        }
        let mut lost = LostEvents::default();
        let (full, ready) = sync_channel(MAX_BLOCKS_AHEAD);
        let (empty, reuse) = sync_channel::<Vec<Event>>(MAX_BLOCKS_AHEAD + 2);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut decoder = self.reader.decoder();
                for block in self.reader.blocks() {
                    let mut events = reuse.try_recv().unwrap_or_default();
                    let decoded = decoder.decode(block, &mut events).map(|()| events);
                    if full.send(decoded).is_err() {
                        return;
                    }
                }
            });
            for block in ready {
                match block {
                    Ok(events) => {
                        sink(&events);
                        // If the channel is full, the buffer is not needed again.
                        let _ = empty.try_send(events);
                    }
                    Err(block) => lost.add(&block),
                }
            }
        });
        lost
    }

    /// Each thread counts one range of the blocks.
    fn event_counts(&self) -> (EventCounts, LostEvents) {
        let blocks = self.reader.blocks();
        let count = |blocks: &[BlockInfo]| {
            let (mut event_counts, mut lost) = (EventCounts::default(), LostEvents::default());
            let mut decoder = self.reader.decoder();
            for block in blocks {
                if let Err(block) = decoder.count_events(block, &mut event_counts) {
                    lost.add(&block);
                }
            }
            (event_counts, lost)
        };
        let mut whole = (EventCounts::default(), LostEvents::default());
        std::thread::scope(|scope| {
            let blocks_per_thread = blocks.len().div_ceil(self.threads).max(1);
            let counting: Vec<_> =
                blocks.chunks(blocks_per_thread).map(|part| scope.spawn(move || count(part))).collect();
            for part in counting {
                let (event_counts, lost) = part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                whole.0.merge(event_counts);
                whole.1.append(lost);
            }
        });
        whole
    }
}
