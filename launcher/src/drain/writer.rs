//! The thread that writes: takes batches from the drain, encodes them and appends them to the trace files.
//!
//! When a file cannot be written (disk full, quota, file-size limit), it stays as it is, a sound trace up to that point; the
//! rest is counted, and the drain is told, so that the traced process stops producing. See [`super::cut`].

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use crossbeam::channel::{Receiver, Sender, bounded, unbounded};
use memtrace_analysis::RunFolder;
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::counters::CounterValues;
use memtrace_trace::event::Event;
use memtrace_trace::file::{End, Reader, Writer};

use super::Written;
use super::cut::{Cut, Reserve, TraceFile};

/// Events, or as many bytes of other things as they have, that may be on their way to the writer: 10 MiB.
const QUEUE_EVENTS: usize = 1 << 17;
/// Events of a batch.
pub(crate) const BATCH_EVENTS: usize = 4096;

/// Empty batches kept for the next events.
const SPARE_BATCHES: usize = QUEUE_EVENTS / BATCH_EVENTS;

/// Names one trace file between the two threads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct FileKey(pub(crate) u32);

/// Some of what a process recorded. Definitions are complete encodings, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) events: Vec<Event>,
    pub(crate) definitions: Vec<u8>,
    pub(crate) clock: Option<ClockPoint>,
    pub(crate) counters: Option<Box<CounterValues>>,
    /// Whether everything so far must reach the file now.
    pub(crate) flush: bool,
}

impl Batch {
    /// What it takes of the queue's room.
    fn size(&self) -> usize {
        self.events.len() + as_events(self.definitions.len())
    }

    /// Whether there is nothing to write.
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.definitions.is_empty() && self.clock.is_none() && self.counters.is_none()
    }
}

/// How many events take as much room as so many bytes.
fn as_events(bytes: usize) -> usize {
    bytes.div_ceil(size_of::<Event>())
}

enum Job {
    Open { key: FileKey, name: String, info: String, failed: Arc<AtomicBool> },
    Write { key: FileKey, batch: Batch },
    Finish { key: FileKey, end: End },
}

/// The drain's end of the queue.
#[derive(Debug)]
pub(crate) struct Queue {
    jobs: Sender<Job>,
    emptied: Receiver<Vec<Event>>,
    queued: Arc<AtomicUsize>,
}

impl Queue {
    /// Whether the writer keeps up. While it does not, the drain leaves events in the rings.
    pub(crate) fn has_room(&self) -> bool {
        self.queued.load(Ordering::Acquire) < QUEUE_EVENTS
    }

    /// Waits until there is room, while this end can do nothing else.
    pub(crate) fn wait_for_room(&self) {
        // A writer that died of a bug has let go of its half.
        while !self.has_room() && Arc::strong_count(&self.queued) > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Starts a file. The flag it returns is raised when the file cannot be written.
    pub(crate) fn open(&self, key: FileKey, name: String, info: String) -> Arc<AtomicBool> {
        let failed = Arc::new(AtomicBool::new(false));
        self.queued.fetch_add(as_events(info.len()), Ordering::AcqRel);
        self.send(Job::Open { key, name, info, failed: Arc::clone(&failed) });
        failed
    }

    /// Hands over a batch and leaves an empty one in its place.
    pub(crate) fn write(&self, key: FileKey, batch: &mut Batch) {
        if batch.is_empty() && !batch.flush {
            return;
        }
        let events = self.emptied.try_recv().unwrap_or_default();
        let batch = std::mem::replace(batch, Batch { events, ..Batch::default() });
        self.queued.fetch_add(batch.size(), Ordering::AcqRel);
        self.send(Job::Write { key, batch });
    }

    /// Ends a file.
    pub(crate) fn finish(&self, key: FileKey, end: End) {
        self.send(Job::Finish { key, end });
    }

    fn send(&self, job: Job) {
        // The writer lives until this end is dropped; if it died of a bug, its panic is reported when it is joined.
        let _ = self.jobs.send(job);
    }
}

/// Starts the writer thread. It ends when the queue is dropped, and returns what became of each file.
pub(crate) fn start(folder: Arc<RunFolder>) -> anyhow::Result<(Queue, JoinHandle<Vec<Written>>)> {
    let (jobs, inbox) = unbounded();
    let (recycle, emptied) = bounded(SPARE_BATCHES);
    let queued = Arc::new(AtomicUsize::new(0));
    let queue = Queue { jobs, emptied, queued: Arc::clone(&queued) };
    let work = move || {
        let reserve = Reserve::take(&folder);
        let mut files = Files { folder, reserve, open: HashMap::new(), cut: Vec::new(), done: Vec::new() };
        for job in inbox {
            match job {
                Job::Open { key, name, info, failed } => {
                    let size = as_events(info.len());
                    files.start(key, name, info, failed);
                    queued.fetch_sub(size, Ordering::AcqRel);
                }
                Job::Write { key, mut batch } => {
                    let size = batch.size();
                    files.write(key, &mut batch);
                    queued.fetch_sub(size, Ordering::AcqRel);
                    batch.events.clear();
                    if batch.events.capacity() > 0 {
                        // Enough spare ones: this one is freed.
                        let _ = recycle.try_send(batch.events);
                    }
                }
                Job::Finish { key, end } => files.finish(key, end),
            }
        }
        files.close()
    };
    let thread =
        std::thread::Builder::new().name("memtrace-write".into()).spawn(work).context("cannot start a thread")?;
    Ok((queue, thread))
}

struct OpenFile {
    /// `None` once writing has failed.
    writer: Option<Writer<TraceFile>>,
    /// Where not even the beginning could be written: what that was to be.
    unbegun: Option<String>,
    failed: Arc<AtomicBool>,
    /// Events that were to be written.
    given: u64,
    /// The last that came, once writing has failed.
    counters: Option<Box<CounterValues>>,
    written: Written,
}

struct Files {
    folder: Arc<RunFolder>,
    reserve: Reserve,
    open: HashMap<FileKey, OpenFile>,
    /// Index into `done`.
    cut: Vec<(usize, Cut)>,
    done: Vec<Written>,
}

impl Files {
    fn start(&mut self, key: FileKey, name: String, info: String, failed: Arc<AtomicBool>) {
        let written = Written { file: name, bytes: 0, unwritten: 0, error: None };
        let mut file = OpenFile { writer: None, unbegun: None, failed, given: 0, counters: None, written };
        match begin(&self.folder, &file.written.file, &info) {
            Ok(writer) => file.writer = Some(writer),
            Err(e) => {
                file.fail(format!("{e:#}"));
                file.unbegun = Some(info);
            }
        }
        self.open.insert(key, file);
    }

    fn write(&mut self, key: FileKey, batch: &mut Batch) {
        let Some(file) = self.open.get_mut(&key) else { return };
        file.given += batch.events.len() as u64;
        match &mut file.writer {
            Some(writer) => {
                if let Err(e) = append(writer, batch) {
                    file.fail(e.to_string());
                    file.counters = batch.counters.take();
                }
            }
            None => file.counters = batch.counters.take().or(file.counters.take()),
        }
    }

    fn finish(&mut self, key: FileKey, end: End) {
        let Some(mut file) = self.open.remove(&key) else { return };
        if let Some(writer) = file.writer.take() {
            match writer.finish(&end) {
                Ok(out) => file.written.bytes = out.bytes(),
                Err(e) => file.fail(e.to_string()),
            }
        }
        if let Some(error) = &file.written.error {
            // What counts is what a reader finds.
            let name = Path::new(&file.written.file);
            let found = self.folder.read(name).ok();
            file.written.bytes = found.as_ref().and_then(|f| f.metadata().ok()).map_or(0, |m| m.len());
            let readable = found.and_then(|f| Reader::of(name, f).ok()).map_or(0, |r| r.event_count());
            file.written.unwritten = file.given - readable.min(file.given);
            let reason = format!("{}; {} events are missing here: {error}", end.reason, file.written.unwritten);
            let cut = Cut { unbegun: file.unbegun, counters: file.counters, end: End { reason, ..end } };
            self.cut.push((self.done.len(), cut));
        }
        self.done.push(file.written);
    }

    /// The run has ended: what was cut short gets its end, where there is room for that.
    fn close(mut self) -> Vec<Written> {
        self.reserve.release();
        for (index, cut) in &self.cut {
            if let Some(written) = self.done.get_mut(*index)
                && let Ok(bytes) = cut.finish(&self.folder, &written.file)
            {
                written.bytes = bytes;
            }
        }
        self.done
    }
}

impl OpenFile {
    fn fail(&mut self, error: String) {
        self.failed.store(true, Ordering::Release);
        self.written.error = Some(error);
        self.writer = None;
    }
}

fn begin(folder: &RunFolder, name: &str, info: &str) -> anyhow::Result<Writer<TraceFile>> {
    // The folder was empty and no name is used twice: what is there already is not ours.
    let file = folder.create_in_place(name).context("cannot create the trace file")?;
    Writer::new(TraceFile::new(file), info).map_err(|e| {
        // It would be no trace.
        let _ = folder.remove(name);
        e.into()
    })
}

fn append(writer: &mut Writer<TraceFile>, batch: &Batch) -> memtrace_trace::error::Result<()> {
    if !batch.definitions.is_empty() {
        writer.definition(&batch.definitions)?;
    }
    for event in &batch.events {
        writer.event(event)?;
    }
    if let Some(point) = batch.clock {
        writer.clock(point)?;
    }
    if let Some(counters) = &batch.counters {
        writer.counters(counters)?;
    }
    if batch.flush { writer.flush() } else { Ok(()) }
}
