//! One traced process image: its segment, its rings, its order of events and what is on its way to its file.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use memtrace_trace::clock::ClockPoint;
use memtrace_trace::counters::{COUNTER_SLOTS, CounterValues};
use memtrace_trace::definition::{Definition, MAX_DEFINITION};
use memtrace_trace::event::Event;
use memtrace_trace::file::End;
use memtrace_trace::ids::ThreadId;
use memtrace_trace::shm::segment::Segment;
use memtrace_trace::wire::Cursor;
use serde_json::Value;

use super::Recorded;
use super::ending;
use super::merge::Merge;
use super::rings::{Intake, Rings};
use super::threads::Threads;
use super::writer::{BATCH_EVENTS, Batch, FileKey, Queue};
use crate::host;
use crate::proc::ProcessDir;

/// Events reach the file at least this often.
const FLUSH_EVERY: Duration = Duration::from_millis(250);
/// Clock points are this far apart while something is recorded.
const CLOCK_EVERY: Duration = Duration::from_secs(1);
/// Counters are recorded this often while something is recorded.
const COUNTERS_EVERY: Duration = Duration::from_secs(4);
/// The most definitions one process may have, in bytes. What comes beyond is refused and counted.
const DEFINITION_BUDGET: u64 = 256 << 20;
/// Definitions of a batch, in bytes.
const BATCH_DEFINITIONS: usize = 64 * 1024;
/// The largest id a definition may have: readers index tables with it.
const MAX_ID: u32 = 1 << 24;
/// The most notices kept for the manifest (the trace has them all).
const MAX_NOTICES: usize = 256;

/// How many slots one look at the rings gave.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Activity {
    /// In all rings together.
    pub(super) slots: u64,
    /// In the ring that had most.
    pub(super) fullest: u64,
}

/// Everything that flows out of one process, on its way to the writer.
#[derive(Debug)]
struct Outflow {
    key: FileKey,
    batch: Batch,
    /// Something went to the writer that has not been flushed.
    unflushed: bool,
    events: u64,
    definition_bytes: u64,
    definitions_refused: u64,
    notices: Vec<super::Notice>,
    /// Its rank and the number of ranks, as it told PyTorch.
    rank: Option<(u32, u32)>,
    scratch: Vec<u8>,
}

impl Outflow {
    fn event(&mut self, event: Event, queue: &Queue) {
        self.batch.events.push(event);
        self.events += 1;
        if self.batch.events.len() >= BATCH_EVENTS {
            self.send(queue);
        }
    }

    fn send(&mut self, queue: &Queue) {
        self.unflushed |= !self.batch.is_empty();
        queue.write(self.key, &mut self.batch);
    }

    /// A definition as it came out of a ring.
    fn foreign_definition(&mut self, bytes: &[u8], queue: &Queue) {
        let mut cursor = Cursor::new(bytes);
        let definition = match Definition::decode(&mut cursor) {
            Ok(Some(definition)) if cursor.is_empty() && bytes.len() <= MAX_DEFINITION && is_sane(&definition) => {
                definition
            }
            _ => {
                self.definitions_refused += 1;
                return;
            }
        };
        if let Definition::Rank { rank, size } = definition {
            self.rank.get_or_insert((rank, size));
        }
        if let Definition::Notice { topic, text, verdict } = definition
            && self.notices.len() < MAX_NOTICES
        {
            self.notices.push(super::Notice {
                topic: topic.to_owned(),
                text: text.to_owned(),
                verdict: verdict.name(),
            });
        }
        self.encoded_definition(bytes, queue);
    }

    /// A definition of our own.
    fn own_definition(&mut self, definition: &Definition<'_>, queue: &Queue) {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        definition.encode(&mut scratch);
        self.encoded_definition(&scratch, queue);
        self.scratch = scratch;
    }

    fn encoded_definition(&mut self, bytes: &[u8], queue: &Queue) {
        if self.definition_bytes + bytes.len() as u64 > DEFINITION_BUDGET {
            self.definitions_refused += 1;
            return;
        }
        self.definition_bytes += bytes.len() as u64;
        self.batch.definitions.extend_from_slice(bytes);
        if self.batch.definitions.len() >= BATCH_DEFINITIONS {
            self.send(queue);
        }
    }
}

/// Whether a traced process may define this. Threads are ours to define.
fn is_sane(definition: &Definition<'_>) -> bool {
    let id = match *definition {
        Definition::Frame { id, .. } | Definition::NativeFrame { id, .. } => id.0,
        Definition::Stack { id, .. } => id.0,
        Definition::Context { id, .. } => id.0,
        Definition::Module { id, .. } => id.0,
        Definition::Thread { .. } => return false,
        Definition::Pool { .. }
        | Definition::Device { .. }
        | Definition::Rank { .. }
        | Definition::Notice { .. } => return true,
    };
    id != 0 && id <= MAX_ID
}

/// A traced process image being recorded.
#[derive(Debug)]
pub(super) struct Process {
    pid: u32,
    segment: Segment,
    /// Readable when the process has died. `None` on kernels before 5.3: then `/proc` is asked now and then.
    pidfd: Option<OwnedFd>,
    dir: ProcessDir,
    /// With the pid, names the process for good.
    start_time: Option<u64>,
    file: String,
    info: Value,
    start_ns: u64,
    rings: Rings,
    threads: Threads,
    merge: Merge,
    out: Outflow,
    /// The file cannot be written: nothing more is produced.
    write_failed: Arc<AtomicBool>,
    flushed_at: Duration,
    clock_at: Duration,
    counters_at: Duration,
}

impl Process {
    /// Starts recording process `pid` into a new file.
    pub(super) fn start(
        pid: u32,
        segment: Segment,
        pidfd: Option<OwnedFd>,
        key: FileKey,
        file: String,
        queue: &Queue,
        now: Duration,
    ) -> Process {
        let dir = ProcessDir::of(pid);
        let info = dir.info(pid);
        let write_failed = queue.open(key, file.clone(), info.to_string());
        let out = Outflow {
            key,
            batch: Batch { clock: Some(ClockPoint::read()), ..Batch::default() },
            unflushed: false,
            events: 0,
            definition_bytes: 0,
            definitions_refused: 0,
            notices: Vec::new(),
            rank: None,
            scratch: Vec::new(),
        };
        Process {
            pid,
            segment,
            pidfd,
            start_time: dir.start_time(),
            dir,
            file,
            info,
            start_ns: host::epoch_ns(),
            rings: Rings::default(),
            threads: Threads::default(),
            merge: Merge::default(),
            out,
            write_failed,
            flushed_at: now,
            clock_at: now,
            counters_at: now,
        }
    }

    /// The process id.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// What becomes readable when the process dies.
    pub(super) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(|fd| fd.as_fd())
    }

    /// Whether the process is gone, where no descriptor tells.
    pub(super) fn is_gone(&self) -> bool {
        self.pidfd.is_none()
            && (self.start_time.is_none() || self.dir.start_time() != self.start_time || self.dir.state() == Some('Z'))
    }

    /// Empties the rings once, as far as the writer keeps up.
    pub(super) fn drain(&mut self, now: Duration, queue: &Queue) -> Activity {
        self.take(now, queue, false)
    }

    fn take(&mut self, now: Duration, queue: &Queue, to_the_end: bool) -> Activity {
        if self.write_failed.load(Ordering::Acquire) {
            self.close();
        }
        let Process { segment, dir, rings, threads, merge, out, .. } = self;
        let mut taking = Taking { dir, threads, merge, out, queue, now, to_the_end, activity: Activity::default() };
        rings.drain(segment, &mut taking);
        taking.activity
    }

    /// What is due from time to time.
    pub(super) fn tick(&mut self, now: Duration, queue: &Queue) {
        let Process { segment, dir, threads, merge, out, .. } = self;
        merge.tick(now, &mut |e| out.event(e, queue));
        if now.saturating_sub(self.flushed_at) < FLUSH_EVERY || (out.batch.is_empty() && !out.unflushed) {
            return;
        }
        threads.refresh(dir, now, false, &mut |d| out.own_definition(d, queue));
        if now.saturating_sub(self.clock_at) >= CLOCK_EVERY {
            out.batch.clock = Some(ClockPoint::read());
            self.clock_at = now;
        }
        if now.saturating_sub(self.counters_at) >= COUNTERS_EVERY {
            out.batch.counters = Some(Box::new(read_counters(segment)));
            self.counters_at = now;
        }
        out.batch.flush = true;
        queue.write(out.key, &mut out.batch);
        out.unflushed = false;
        self.flushed_at = now;
    }

    /// Tells the process that nobody will drain any more.
    pub(super) fn close(&self) {
        self.segment.header().closed.0.store(1, Ordering::Release);
    }

    /// The end of this image: everything that was published is taken, and the file is finished.
    pub(super) fn finish(mut self, reason: &'static str, now: Duration, queue: &Queue) -> Recorded {
        // First of all: on old kernels this must be faster than the process's parent.
        let pidfd = self.pidfd.as_ref().map(|fd| fd.as_fd());
        let wait_status = pidfd.and_then(|fd| ending::wait_status(fd, &self.dir, self.start_time));
        self.close();
        // While a process still runs, its threads may be in the middle of an event: a few more looks, but not for ever.
        for _ in 0..16 {
            if self.take(now, queue, true).slots == 0 {
                break;
            }
        }
        let counters = read_counters(&self.segment);
        let Process { pid, segment, dir, file, info, start_ns, rings, mut threads, mut merge, mut out, .. } = self;
        threads.refresh(&dir, now, true, &mut |d| out.own_definition(d, queue));
        let issued = segment.header().next_seq.0.load(Ordering::Acquire);
        merge.finish(issued, &mut |e| out.event(e, queue));
        out.batch.clock = Some(ClockPoint::read());
        out.batch.counters = Some(Box::new(counters));
        out.batch.flush = true;
        queue.write(out.key, &mut out.batch);
        let (lost, late) = (merge.lost(), merge.late());
        queue.finish(out.key, End { wait_status, lost, late, reason: reason.to_owned() });
        Recorded {
            pid,
            file,
            info,
            start_ns,
            end_ns: host::epoch_ns(),
            wait_status,
            reason,
            events: out.events,
            lost,
            late,
            corrupt: rings.corrupt(),
            definitions_refused: out.definitions_refused,
            counters,
            notices: out.notices,
            rank: out.rank,
        }
    }
}

/// Sorts what comes out of the rings.
struct Taking<'a> {
    dir: &'a ProcessDir,
    threads: &'a mut Threads,
    merge: &'a mut Merge,
    out: &'a mut Outflow,
    queue: &'a Queue,
    now: Duration,
    /// Take everything, however far the writer is behind.
    to_the_end: bool,
    activity: Activity,
}

impl Intake for Taking<'_> {
    fn writer(&mut self, tid: u32, name: Option<&str>) -> ThreadId {
        let (out, queue) = (&mut *self.out, self.queue);
        self.threads.id(tid, name, self.dir, self.now, &mut |d| out.own_definition(d, queue))
    }

    fn has_room(&self) -> bool {
        self.to_the_end || self.queue.has_room()
    }

    fn event(&mut self, event: Event) {
        let (out, queue) = (&mut *self.out, self.queue);
        self.merge.insert(event, &mut |e| out.event(e, queue));
    }

    fn definition(&mut self, bytes: &[u8]) {
        self.out.foreign_definition(bytes, self.queue);
    }

    fn ring_done(&mut self, thread: ThreadId, slots: u64) {
        self.threads.active(thread);
        self.activity.slots += slots;
        self.activity.fullest = self.activity.fullest.max(slots);
    }
}

fn read_counters(segment: &Segment) -> CounterValues {
    let mut values = [0; COUNTER_SLOTS];
    for (value, counter) in values.iter_mut().zip(&segment.header().counters.0) {
        *value = counter.load(Ordering::Relaxed);
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::ids::{FrameId, StackId, ThreadId};

    #[test]
    fn only_sane_definitions_pass() {
        let stack = |id| Definition::Stack { id: StackId(id), parent: StackId::NONE, frame: FrameId(1) };
        assert!(is_sane(&stack(1)) && is_sane(&stack(MAX_ID)));
        assert!(!is_sane(&stack(0)) && !is_sane(&stack(MAX_ID + 1)));
        assert!(!is_sane(&Definition::Thread { id: ThreadId(1), tid: 1, name: "forged" }));
    }
}
