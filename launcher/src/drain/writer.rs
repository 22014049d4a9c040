//! The writer thread: takes batches from the drain loop, encodes them and appends them to the trace files.
//!
//! Writing fails when the disk is full or a quota or file-size limit is reached. The file then stays as it is, a valid
//! trace up to that point. The missing events are counted, and a flag makes the drain loop stop the traced process
//! from producing. [`super::truncated`] later completes such files.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use memtrace_analysis::RunFolder;
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::counters::CounterValues;
use memtrace_trace::event::Event;
use memtrace_trace::file::{End, Reader, Writer};

use super::Written;
use super::rotation::{Due, Rotator};
use super::truncated::{Reserve, TraceFile, TruncatedTrace};
use crate::option_values::Kept;

/// The capacity of the queue to the writer, in events: 10 MiB. Other data counts by its size in bytes.
const QUEUE_EVENTS: usize = 1 << 17;
/// The number of events in a full batch.
pub(crate) const BATCH_EVENTS: usize = 4096;

/// The maximum number of empty event vectors kept for reuse.
const SPARE_BATCHES: usize = QUEUE_EVENTS / BATCH_EVENTS;

/// While a trace is rotated, the writer thread looks so often whether the new one is complete.
const ROTATION_POLL: Duration = Duration::from_millis(50);

/// Identifies one trace file between the drain thread and the writer thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct FileKey(pub(crate) u32);

/// A part of the records of one process. `definitions` holds complete encodings, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) events: Vec<Event>,
    pub(crate) definitions: Vec<u8>,
    pub(crate) clock: Option<ClockPoint>,
    pub(crate) counters: Option<Box<CounterValues>>,
    /// Whether all data so far must reach the file now.
    pub(crate) flush: bool,
    /// The number of the traced process's request that this flush serves, if there is one.
    pub(crate) request: Option<u64>,
    /// The number of the inquiry that this flush serves, if there is one.
    pub(crate) inquiry: Option<u64>,
}

/// The writer thread's report about a file.
#[derive(Debug, Default)]
pub(crate) struct FileProgress {
    /// Whether the file cannot be written.
    pub(crate) failed: AtomicBool,
    /// The number of the last request ([`Batch::request`]) whose events are in the file.
    pub(crate) served: AtomicU64,
    /// The number of the last inquiry ([`Batch::inquiry`]) whose events are in the file.
    pub(crate) written_out: AtomicU64,
}

impl FileProgress {
    /// Whether the file has all that it will ever have of the events before this inquiry.
    pub(crate) fn is_complete(&self, inquiry: u64) -> bool {
        self.written_out.load(Ordering::Acquire) >= inquiry || self.failed.load(Ordering::Acquire)
    }
}

impl Batch {
    /// The space that this batch takes in the queue, in events.
    fn size(&self) -> usize {
        self.events.len() + as_events(self.definitions.len())
    }

    /// Whether there is nothing to write.
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.definitions.is_empty() && self.clock.is_none() && self.counters.is_none()
    }
}

/// The number of events that take as much space as `bytes`, rounded up.
fn as_events(bytes: usize) -> usize {
    bytes.div_ceil(size_of::<Event>())
}

enum Job {
    Open { key: FileKey, name: String, info: String, progress: Arc<FileProgress> },
    Write { key: FileKey, batch: Batch },
    Finish { key: FileKey, end: End },
}

/// The drain thread's end of the queue.
#[derive(Debug)]
pub(crate) struct Queue {
    jobs: Sender<Job>,
    emptied: Receiver<Vec<Event>>,
    queued: Arc<AtomicUsize>,
}

impl Queue {
    /// Whether the writer keeps up. While it does not, the drain loop leaves events in the rings.
    pub(crate) fn has_room(&self) -> bool {
        self.queued.load(Ordering::Acquire) < QUEUE_EVENTS
    }

    /// Blocks until the queue has space. For callers that have no other work.
    pub(crate) fn wait_for_room(&self) {
        // A writer thread that panicked has dropped its reference to the counter.
        while !self.has_room() && Arc::strong_count(&self.queued) > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Starts a file. The writer thread updates the returned progress.
    pub(crate) fn open(&self, key: FileKey, name: String, info: String) -> Arc<FileProgress> {
        let progress = Arc::new(FileProgress::default());
        self.queued.fetch_add(as_events(info.len()), Ordering::AcqRel);
        self.send(Job::Open { key, name, info, progress: Arc::clone(&progress) });
        progress
    }

    /// Sends a batch and leaves an empty one in its place.
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
        // The writer lives until this sender is dropped. If it panicked, joining its thread reports the panic.
        let _ = self.jobs.send(job);
    }
}

/// Starts the writer thread. The thread ends when the queue is dropped, and returns the result of each file.
///
/// Fails when the thread cannot be started.
pub(crate) fn start(folder: Arc<RunFolder>, kept: Option<Kept>) -> anyhow::Result<(Queue, JoinHandle<Vec<Written>>)> {
    let (jobs, inbox) = unbounded();
    let (recycle, emptied) = bounded(SPARE_BATCHES);
    let queued = Arc::new(AtomicUsize::new(0));
    let queue = Queue { jobs, emptied, queued: Arc::clone(&queued) };
    let work = move || {
        let reserve = Reserve::take(&folder);
        let rotator = kept.map(|kept| Rotator::new(Arc::clone(&folder), kept));
        let mut files =
            Files { folder, reserve, rotator, open: HashMap::new(), truncated: Vec::new(), done: Vec::new() };
        loop {
            let job = match files.is_rotating() {
                true => inbox.recv_timeout(ROTATION_POLL),
                false => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            files.switch();
            let job = match job {
                Ok(job) => job,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            match job {
                Job::Open { key, name, info, progress } => {
                    let size = as_events(info.len());
                    files.start(key, name, info, progress);
                    queued.fetch_sub(size, Ordering::AcqRel);
                }
                Job::Write { key, mut batch } => {
                    let size = batch.size();
                    files.write(key, &mut batch);
                    queued.fetch_sub(size, Ordering::AcqRel);
                    batch.events.clear();
                    if batch.events.capacity() > 0 {
                        // With enough spare vectors, this one is freed.
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
    /// The info object of a file whose beginning could not be written.
    unwritten_info: Option<String>,
    progress: Arc<FileProgress>,
    /// The number of events that were to be written.
    given: u64,
    /// The number of these that rotation has dropped, without those that the file has again.
    dropped: u64,
    /// When the file is rotated next.
    due: Option<Due>,
    /// The most recent counters that arrived after writing had failed.
    counters: Option<Box<CounterValues>>,
    written: Written,
}

struct Files {
    folder: Arc<RunFolder>,
    reserve: Reserve,
    rotator: Option<Rotator>,
    open: HashMap<FileKey, OpenFile>,
    /// Incomplete traces, each with its index into `done`.
    truncated: Vec<(usize, TruncatedTrace)>,
    done: Vec<Written>,
}

impl Files {
    fn start(&mut self, key: FileKey, name: String, info: String, progress: Arc<FileProgress>) {
        let written = Written { file: name, bytes: 0, unwritten: 0, error: None };
        let due = self.rotator.as_ref().map(|rotator| rotator.due(0, Instant::now()));
        let mut file = OpenFile {
            writer: None,
            unwritten_info: None,
            progress,
            given: 0,
            dropped: 0,
            due,
            counters: None,
            written,
        };
        match begin(&self.folder, &file.written.file, &info) {
            Ok(writer) => file.writer = Some(writer),
            Err(e) => {
                file.fail(format!("{e:#}"));
                file.unwritten_info = Some(info);
            }
        }
        self.open.insert(key, file);
    }

    fn write(&mut self, key: FileKey, batch: &mut Batch) {
        let Some(file) = self.open.get_mut(&key) else { return };
        file.given += batch.events.len() as u64;
        match &mut file.writer {
            Some(writer) => match append(writer, batch) {
                Ok(()) => {
                    if let Some(request) = batch.request {
                        file.progress.served.store(request, Ordering::Release);
                    }
                    if let Some(inquiry) = batch.inquiry {
                        file.progress.written_out.store(inquiry, Ordering::Release);
                    }
                    if let (Some(rotator), Some(due)) = (&mut self.rotator, &mut file.due) {
                        rotator.start_if_due(key.0, &file.written.file, writer.out().bytes(), due);
                    }
                }
                Err(e) => {
                    file.fail(e.to_string());
                    file.counters = batch.counters.take();
                }
            },
            None => file.counters = batch.counters.take().or(file.counters.take()),
        }
    }

    /// Whether a trace is being rotated.
    fn is_rotating(&self) -> bool {
        self.rotator.as_ref().is_some_and(Rotator::is_rotating)
    }

    /// Goes on in a rotated trace, once it is complete.
    fn switch(&mut self) {
        let Some(rotator) = &mut self.rotator else { return };
        let Some(key) = rotator.ready().map(FileKey) else { return };
        match self.open.get_mut(&key) {
            Some(OpenFile { writer: Some(writer), dropped, due, .. }) => {
                if let Some((missing, next)) = rotator.switch(writer) {
                    (*dropped, *due) = (missing, Some(next));
                }
            }
            // Writing has failed meanwhile.
            _ => rotator.cancel(key.0),
        }
    }

    fn finish(&mut self, key: FileKey, end: End) {
        if let Some(rotator) = &mut self.rotator {
            rotator.cancel(key.0);
        }
        let Some(mut file) = self.open.remove(&key) else { return };
        if let Some(writer) = file.writer.take() {
            match writer.finish(&end) {
                Ok(out) => file.written.bytes = out.bytes(),
                Err(e) => file.fail(e.to_string()),
            }
        }
        if let Some(error) = &file.written.error {
            // Count the events that a reader can find in the file.
            let name = Path::new(&file.written.file);
            let found = self.folder.open_file(name).ok();
            file.written.bytes = found.as_ref().and_then(|f| f.metadata().ok()).map_or(0, |m| m.len());
            let readable = found.and_then(|f| Reader::of(name, f).ok()).map_or(0, |r| r.event_count());
            file.written.unwritten = file.given - (readable + file.dropped).min(file.given);
            let reason = format!("{}; {} events are missing in this file: {error}", end.reason, file.written.unwritten);
            let trace = TruncatedTrace {
                unwritten_info: file.unwritten_info,
                counters: file.counters,
                end: End { reason, ..end },
            };
            self.truncated.push((self.done.len(), trace));
        }
        file.progress.written_out.store(u64::MAX, Ordering::Release);
        self.done.push(file.written);
    }

    /// Completes the truncated traces, where there is space now. Runs once, at the end of the run.
    fn close(mut self) -> Vec<Written> {
        self.reserve.release();
        for (index, trace) in &self.truncated {
            if let Some(written) = self.done.get_mut(*index)
                && let Ok(bytes) = trace.finish(&self.folder, &written.file)
            {
                written.bytes = bytes;
            }
        }
        self.done
    }
}

impl OpenFile {
    fn fail(&mut self, error: String) {
        self.progress.failed.store(true, Ordering::Release);
        self.written.error = Some(error);
        self.writer = None;
    }
}

fn begin(folder: &RunFolder, name: &str, info: &str) -> anyhow::Result<Writer<TraceFile>> {
    // The run folder was empty and each name is used once. An existing file is therefore not from this run.
    let file = folder.create_replacing(name).context("cannot create the trace file")?;
    Writer::new(TraceFile::new(file), info).map_err(|e| {
        // Without a complete header the file is not a valid trace.
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
