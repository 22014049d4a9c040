//! The thread that writes: takes batches from the drain, encodes them and appends them to the trace files.
//!
//! When a file cannot be written (disk full, quota, file-size limit), it stays as it is, a sound trace up to that point; the
//! rest is counted, and the drain is told, so that the traced process stops producing.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
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
        let mut files = Files { folder, open: HashMap::new(), done: Vec::new() };
        for job in inbox {
            match job {
                Job::Open { key, name, info, failed } => {
                    files.start(key, name, &info, failed);
                    queued.fetch_sub(as_events(info.len()), Ordering::AcqRel);
                }
                Job::Write { key, mut batch } => {
                    files.write(key, &batch);
                    queued.fetch_sub(batch.size(), Ordering::AcqRel);
                    batch.events.clear();
                    if batch.events.capacity() > 0 {
                        // Enough spare ones: this one is freed.
                        let _ = recycle.try_send(batch.events);
                    }
                }
                Job::Finish { key, end } => files.finish(key, &end),
            }
        }
        files.done
    };
    let thread =
        std::thread::Builder::new().name("memtrace-write".into()).spawn(work).context("cannot start a thread")?;
    Ok((queue, thread))
}

/// A file that counts what reached it.
struct Counted {
    file: File,
    bytes: u64,
}

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

struct OpenFile {
    /// `None` once writing has failed.
    writer: Option<Writer<Counted>>,
    failed: Arc<AtomicBool>,
    /// Events that were to be written.
    given: u64,
    written: Written,
}

struct Files {
    folder: Arc<RunFolder>,
    open: HashMap<FileKey, OpenFile>,
    done: Vec<Written>,
}

impl Files {
    fn start(&mut self, key: FileKey, name: String, info: &str, failed: Arc<AtomicBool>) {
        let mut written = Written { file: name, bytes: 0, unwritten: 0, error: None };
        let writer = match begin(&self.folder, &written.file, info) {
            Ok(writer) => Some(writer),
            Err(e) => {
                failed.store(true, Ordering::Release);
                written.error = Some(format!("{e:#}"));
                None
            }
        };
        self.open.insert(key, OpenFile { writer, failed, given: 0, written });
    }

    fn write(&mut self, key: FileKey, batch: &Batch) {
        let Some(file) = self.open.get_mut(&key) else { return };
        file.given += batch.events.len() as u64;
        let Some(writer) = &mut file.writer else { return };
        if let Err(e) = append(writer, batch) {
            file.fail(&e);
        }
    }

    fn finish(&mut self, key: FileKey, end: &End) {
        let Some(mut file) = self.open.remove(&key) else { return };
        if let Some(writer) = file.writer.take() {
            match writer.finish(end) {
                Ok(out) => file.written.bytes = out.bytes,
                Err(e) => file.fail(&e),
            }
        }
        if file.written.error.is_some() {
            // What counts is what a reader finds.
            let name = Path::new(&file.written.file);
            let found = self.folder.read(name).ok();
            file.written.bytes = found.as_ref().and_then(|f| f.metadata().ok()).map_or(0, |m| m.len());
            let readable = found.and_then(|f| Reader::of(name, f).ok()).map_or(0, |r| r.event_count());
            file.written.unwritten = file.given - readable.min(file.given);
        }
        self.done.push(file.written);
    }
}

impl OpenFile {
    fn fail(&mut self, error: &memtrace_trace::error::Error) {
        self.failed.store(true, Ordering::Release);
        self.written.error = Some(error.to_string());
        self.writer = None;
    }
}

fn begin(folder: &RunFolder, name: &str, info: &str) -> anyhow::Result<Writer<Counted>> {
    // The folder was empty and no name is used twice: what is there already is not ours.
    let file = folder.create_in_place(name).context("cannot create the trace file")?;
    Ok(Writer::new(Counted { file, bytes: 0 }, info)?)
}

fn append(writer: &mut Writer<Counted>, batch: &Batch) -> memtrace_trace::error::Result<()> {
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
