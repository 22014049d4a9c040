//! The recording of one traced process image: its shared segment, its rings, the event order and the pending output.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use memtrace_trace::clock::ClockPoint;
use memtrace_trace::counters::{COUNTER_SLOTS, Counter, CounterValues};
use memtrace_trace::definition::Definition;
use memtrace_trace::event::Event;
use memtrace_trace::file::End;
use memtrace_trace::ids::ThreadId;
use memtrace_trace::shm::layout::{FIRST_LIVE_SEQ, FIRST_SEQ, RING_COUNT, RING_SLOTS};
use memtrace_trace::shm::segment::Segment;
use memtrace_trace::shm::validation;
use serde_json::Value;

use super::Recorded;
use super::acceptor::Peer;
use super::exit_status;
use super::limits::Limits;
use super::merge::Merge;
use super::rings::{Intake, Rings};
use super::threads::Threads;
use super::writer::{BATCH_EVENTS, Batch, FileKey, FileProgress, Queue};
use crate::host;
use crate::metrics::{Figures, ProcessFigures};
use crate::proc::ProcessDir;

/// The longest time an event waits in memory before it is flushed to the file.
const FLUSH_INTERVAL: Duration = Duration::from_millis(250);
/// The shortest interval between two flushes that the traced process requests. It bounds how much of the file they take.
const REQUESTED_FLUSH_INTERVAL: Duration = Duration::from_millis(5);
/// The interval between clock points while the process records events.
const CLOCK_INTERVAL: Duration = Duration::from_secs(1);
/// The interval between counter snapshots while the process records events.
const COUNTERS_INTERVAL: Duration = Duration::from_secs(4);
/// The definition budget of one process, in bytes.
///
/// The budget covers the encoded definitions and the table entries that a reader allocates for skipped ids. Definitions
/// beyond it are refused and counted.
const DEFINITION_BUDGET: u64 = 256 << 20;
/// Bytes that a reader's table needs for one skipped id.
const TABLE_ENTRY: u64 = 64;
/// Encoded definition bytes after which a batch is sent to the writer.
const BATCH_DEFINITIONS: usize = 64 * 1024;
/// The maximum number of notices kept for the manifest. The trace file contains every notice.
const MAX_NOTICES: usize = 256;
/// Slots taken from one process before the drain loop serves the next one: about 5 ms of work.
const MAX_SLOTS_PER_PASS: u64 = 1 << 16;
/// The maximum number of final passes over the rings. Passes that stop early or give up a gap do not count.
///
/// Final passes start when the image has ended, or when its recording ends while it still runs. Its threads may still
/// be in the middle of an event.
const MAX_FINAL_PASSES: u32 = 16;
/// The maximum number of gaps that the final passes may give up.
///
/// Full rings of all threads hold 128 reorder windows of events, with one such gap each.
const MAX_FINAL_GAPS: u32 = 4096;

/// The number of slots that one pass over the rings yielded.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Activity {
    /// The total over all rings.
    pub(super) slots: u64,
    /// The count of the fullest ring.
    pub(super) fullest: u64,
}

/// The output of one process on its way to the writer.
#[derive(Debug)]
struct Output {
    key: FileKey,
    batch: Batch,
    /// Whether data was sent to the writer since the last flush.
    unflushed: bool,
    events: u64,
    definition_bytes: u64,
    definitions_refused: u64,
    /// The highest id so far in each reader table. [`table`] gives the index.
    highest_ids: [u32; 4],
    limits: Limits,
    notices: Vec<super::Notice>,
    /// The rank and the world size that the process gave to PyTorch.
    rank: Option<(u32, u32)>,
    scratch: Vec<u8>,
    figures: Option<LiveFigures>,
}

/// The current figures of a process. They end with this value.
#[derive(Debug)]
struct LiveFigures {
    process: Arc<ProcessFigures>,
    all: Figures,
}

impl Drop for LiveFigures {
    fn drop(&mut self) {
        self.all.end(&self.process);
    }
}

impl Output {
    fn event(&mut self, event: Event, queue: &Queue) {
        self.batch.events.push(event);
        self.events += 1;
        if self.batch.events.len() >= BATCH_EVENTS {
            self.send(queue);
        }
    }

    fn send(&mut self, queue: &Queue) {
        self.unflushed |= !self.batch.is_empty();
        self.follow();
        queue.write(self.key, &mut self.batch);
    }

    /// Takes the events of the batch into the current figures.
    fn follow(&self) {
        if let Some(figures) = &self.figures {
            figures.process.apply(&self.batch.events);
        }
    }

    /// Checks a definition that came out of a ring and sends it on. Malformed and over-budget definitions are counted.
    fn untrusted_definition(&mut self, bytes: &[u8], queue: &Queue) {
        let Some(definition) = validation::decode_definition(bytes) else {
            self.definitions_refused += 1;
            return;
        };
        if let Definition::Rank { rank, size } = definition {
            self.rank.get_or_insert((rank, size));
        }
        if !self.has_table_space(&definition) {
            self.definitions_refused += 1;
            return;
        }
        if let Some(figures) = &self.figures {
            figures.process.define(&definition);
        }
        if let Definition::Notice { topic, text, status } = definition
            && self.notices.len() < MAX_NOTICES
            && self.limits.kept_text.take((topic.len() + text.len()) as u64)
        {
            self.notices.push(super::Notice { topic: topic.to_owned(), text: text.to_owned(), status: status.name() });
        }
        self.encoded_definition(bytes, queue);
    }

    /// Charges the budget for the ids that this definition skips. Returns false when they do not fit.
    fn has_table_space(&mut self, definition: &Definition<'_>) -> bool {
        let Some((table, id)) = table(definition) else { return true };
        let Some(highest) = self.highest_ids.get_mut(table) else { return false };
        let skipped = TABLE_ENTRY * u64::from(id.saturating_sub(*highest).saturating_sub(1));
        let fits = self.definition_bytes + skipped <= DEFINITION_BUDGET;
        if fits {
            self.definition_bytes += skipped;
            *highest = id.max(*highest);
        }
        fits
    }

    /// Encodes and sends a definition that the launcher itself makes.
    fn launcher_definition(&mut self, definition: &Definition<'_>, queue: &Queue) {
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

/// The index of the reader table that stores this definition, and its id there. `None` for definitions without an id.
fn table(definition: &Definition<'_>) -> Option<(usize, u32)> {
    match *definition {
        Definition::Frame { id, .. } | Definition::NativeFrame { id, .. } => Some((0, id.0)),
        Definition::Stack { id, .. } => Some((1, id.0)),
        Definition::Context { id, .. } | Definition::NnCall { id, .. } => Some((2, id.0)),
        Definition::Module { id, .. } => Some((3, id.0)),
        Definition::FrameOrigin { .. }
        | Definition::Thread { .. }
        | Definition::Pool { .. }
        | Definition::Device { .. }
        | Definition::Rank { .. }
        | Definition::NnName { .. }
        | Definition::TensorName { .. }
        | Definition::Cycle { .. }
        | Definition::Holder { .. }
        | Definition::HolderScan { .. }
        | Definition::Label { .. }
        | Definition::Rotation(_)
        | Definition::EarlierBlock(_)
        | Definition::Notice { .. } => None,
    }
}

/// A traced process image that is being recorded.
#[derive(Debug)]
pub(super) struct Process {
    pid: u32,
    segment: Segment,
    /// Becomes readable when the process has ended. `None` on kernels before 5.3, where [`Self::has_exited`] polls
    /// `/proc`.
    pidfd: Option<OwnedFd>,
    dir: ProcessDir,
    /// The start time from `/proc`. Together with the pid it identifies the process uniquely.
    start_time: Option<u64>,
    file: String,
    info: Value,
    start_ns: u64,
    rings: Rings,
    threads: Threads,
    merge: Merge,
    out: Output,
    /// Updated by the writer. When the file cannot be written, the traced process stops producing events.
    progress: Arc<FileProgress>,
    flush_requests: FlushRequests,
    /// The number of the last inquiry, which the drain loop counts.
    last_inquiry: u64,
    /// The flushes for inquiries.
    inquiries: FlushRequests,
    /// The result of the last pass over the rings.
    last_pass: PassResult,
    final_passes: Option<FinalPasses>,
    flushed_at: Duration,
    clock_at: Duration,
    counters_at: Duration,
}

impl Process {
    /// Starts to record this process into a new file.
    ///
    /// `now` is the awake time of the drain loop. `key` and `file` identify the trace file to the writer. With `figures`, the
    /// current figures of the process are kept there.
    pub(super) fn start(
        peer: Peer,
        segment: Segment,
        (key, file): (FileKey, String),
        queue: &Queue,
        now: Duration,
        limits: &Limits,
        figures: Option<&Figures>,
    ) -> Process {
        let Peer { pid, pidfd } = peer;
        let dir = ProcessDir::of(pid);
        let mut info = dir.info(pid);
        let text = info.to_string();
        if !limits.kept_text.take(text.len() as u64) {
            // The manifest goes without the info object. The trace file still contains all of it.
            info = Value::Null;
        }
        let progress = queue.open(key, file.clone(), text);
        let mut out = Output {
            key,
            batch: Batch { clock: Some(ClockPoint::read()), ..Batch::default() },
            unflushed: false,
            events: 0,
            definition_bytes: 0,
            definitions_refused: 0,
            highest_ids: [0; 4],
            limits: limits.clone(),
            notices: Vec::new(),
            rank: None,
            scratch: Vec::new(),
            figures: figures
                .map(|figures| LiveFigures { process: figures.start(pid, file.clone()), all: figures.clone() }),
        };
        // Send the first clock point at once. The next point would replace it, and a short process would have only one.
        out.send(queue);
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
            progress,
            flush_requests: FlushRequests::default(),
            last_inquiry: 0,
            inquiries: FlushRequests::default(),
            last_pass: PassResult::default(),
            final_passes: None,
            flushed_at: now,
            clock_at: now,
            counters_at: now,
        }
    }

    /// The process id in the launcher's pid namespace.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// The name of the trace file inside the run folder.
    pub(super) fn file(&self) -> &str {
        &self.file
    }

    /// What the writer has done for the trace file.
    pub(super) fn progress(&self) -> &Arc<FileProgress> {
        &self.progress
    }

    /// Writes out for inquiry `number` what the process has published until now.
    pub(super) fn write_out(&mut self, number: u64) {
        self.last_inquiry = number;
    }

    /// The descriptor that becomes readable when the process ends. `None` on kernels before 5.3.
    pub(super) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(|fd| fd.as_fd())
    }

    /// Whether `/proc` shows that the process has ended. Always false when there is a pidfd, which reports the end
    /// itself.
    pub(super) fn has_exited(&self) -> bool {
        self.pidfd.is_none()
            && (self.start_time.is_none() || self.dir.start_time() != self.start_time || self.dir.state() == Some('Z'))
    }

    /// Empties the rings once, as far as the writer keeps up. Returns the number of slots taken.
    pub(super) fn drain(&mut self, now: Duration, queue: &Queue) -> Activity {
        self.pass(now, queue);
        self.last_pass.activity
    }

    /// The number of places for which the reorder window has memory.
    pub(super) fn places(&self) -> usize {
        self.merge.places()
    }

    /// Gives up the oldest gaps until the reorder window holds at most `places` places.
    pub(super) fn keep_places(&mut self, places: usize, queue: &Queue) {
        let Process { merge, out, .. } = self;
        merge.keep_places(places, &mut |e| out.event(e, queue));
    }

    /// Makes one pass over the rings.
    fn pass(&mut self, now: Duration, queue: &Queue) {
        if self.progress.failed.load(Ordering::Acquire) {
            self.close();
        }
        let requested = self.segment.header().flushes_requested.0.load(Ordering::Acquire);
        // Acquire: this pass then sees all events that the process has published before.
        let prior_state_end = self.segment.header().prior_state_end.load(Ordering::Acquire);
        let Process { segment, dir, rings, threads, merge, out, .. } = self;
        let result = PassResult::default();
        let mut pass = PassIntake { dir, threads, merge, out, queue, now, result };
        rings.drain(segment, &mut pass);
        let result = pass.result;
        self.last_pass = result;
        self.pass_prior_state(prior_state_end, queue);
        if !self.last_pass.stopped_early && self.last_pass.out_of_place.is_none() {
            self.flush_requests.taken(requested, self.merge.end());
            self.inquiries.taken(self.last_inquiry, self.merge.end());
        }
        let Process { merge, out, final_passes, .. } = self;
        let Some(final_passes) = final_passes else { return };
        final_passes.allowance = final_passes.allowance.saturating_sub(self.last_pass.activity.slots);
        match self.last_pass {
            PassResult { stopped_early: true, .. } => {}
            PassResult { out_of_place: None, .. } => final_passes.count += 1,
            // The image writes no more events. A smaller number that no ring holds will never arrive.
            PassResult { out_of_place: Some(seq), activity: Activity { slots: 0, .. }, .. }
                if final_passes.gaps > 0 =>
            {
                final_passes.gaps -= 1;
                merge.give_up_below(seq, &mut |e| out.event(e, queue));
            }
            PassResult { out_of_place: Some(_), activity, .. } => final_passes.count += u32::from(activity.slots == 0),
        }
    }

    /// Continues with the events of the running process once those that recreate its prior state are all taken, or if
    /// they will not come any more.
    fn pass_prior_state(&mut self, end: u64, queue: &Queue) {
        let is_attached = self.segment.header().is_attached.load(Ordering::Relaxed) != 0;
        let Process { merge, out, final_passes, last_pass, .. } = self;
        if !is_attached || merge.next() >= FIRST_LIVE_SEQ {
            return;
        }
        let is_complete = end != 0 && merge.next() >= end;
        let will_not_come = final_passes.is_some() && last_pass.activity.slots == 0;
        if is_complete || will_not_come {
            merge.skip_to(FIRST_LIVE_SEQ, &mut |e| out.event(e, queue));
        }
    }

    /// Whether memtrace has attached to the process, and has taken the state that was there before.
    pub(super) fn is_state_known(&self) -> bool {
        self.is_attached() && self.merge.next() >= FIRST_LIVE_SEQ
    }

    /// Asks a process that the launcher has attached to to end its recording.
    pub(super) fn request_detach(&self) {
        let header = self.segment.header();
        if header.is_attached.load(Ordering::Relaxed) != 0 {
            header.detach_requested.store(1, Ordering::Release);
            // SAFETY: the word is in the segment, which is mapped. The process waits for the same word of the shared file.
            unsafe {
                let word = header.detach_requested.as_ptr();
                libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX, 0usize, 0usize, 0);
            }
        }
    }

    /// Whether memtrace has attached to the process, which ends its recording itself.
    pub(super) fn is_attached(&self) -> bool {
        self.segment.header().is_attached.load(Ordering::Relaxed) != 0
    }

    /// Whether the process has ended its recording.
    pub(super) fn is_detached(&self) -> bool {
        self.segment.header().is_detached.load(Ordering::Acquire) != 0
    }

    /// Runs the periodic work: releases overdue events, then flushes the batch with thread names, clock points and
    /// counters. A flush that the traced process or an inquiry has requested happens as soon as its events are in the
    /// batch.
    pub(super) fn tick(&mut self, now: Duration, queue: &Queue) {
        let Process { segment, dir, threads, merge, out, .. } = self;
        merge.tick(now, &mut |e| out.event(e, queue));
        let since = now.saturating_sub(self.flushed_at);
        let may_flush = since >= REQUESTED_FLUSH_INTERVAL;
        let request = if may_flush { self.flush_requests.ready(merge.next()) } else { None };
        let inquiry = if may_flush { self.inquiries.ready(merge.next()) } else { None };
        let is_requested = request.is_some() || inquiry.is_some();
        if !is_requested && (since < FLUSH_INTERVAL || (out.batch.is_empty() && !out.unflushed)) {
            return;
        }
        (out.batch.request, out.batch.inquiry) = (request, inquiry);
        threads.refresh(dir, now, false, &mut |d| out.launcher_definition(d, queue));
        if is_requested || now.saturating_sub(self.clock_at) >= CLOCK_INTERVAL {
            out.batch.clock = Some(ClockPoint::read());
            self.clock_at = now;
        }
        if is_requested || now.saturating_sub(self.counters_at) >= COUNTERS_INTERVAL {
            out.batch.counters = Some(Box::new(read_counters(segment)));
            self.counters_at = now;
        }
        out.batch.flush = true;
        out.follow();
        queue.write(out.key, &mut out.batch);
        out.unflushed = false;
        self.flushed_at = now;
    }

    /// Publishes the total number of slots that the drain loop has taken from all processes.
    ///
    /// A thread that waits for space in its ring reads this number. As long as it rises, waiting makes sense. Also
    /// publishes which requested flushes have reached the file.
    pub(super) fn publish_progress(&self, taken: u64) {
        let header = self.segment.header();
        header.taken.0.store(taken, Ordering::Relaxed);
        header.flushes_done.store(self.progress.served.load(Ordering::Acquire), Ordering::Release);
    }

    /// Marks the segment as closed, so that the process stops to write events.
    pub(super) fn close(&self) {
        self.segment.header().closed.0.store(1, Ordering::Release);
    }

    /// Ends the recording, because the image writes no more or because nobody will read its events. Only the first
    /// `reason` is kept.
    ///
    /// Later passes take the events that were already published, in turn with those of other processes.
    pub(super) fn end(&mut self, reason: &'static str) {
        if self.final_passes.is_some() {
            return;
        }
        // Read the exit status first. On old kernels it must be read before the parent collects the process.
        let pidfd = self.pidfd.as_ref().map(|fd| fd.as_fd());
        let wait_status = pidfd.and_then(|fd| exit_status::wait_status(fd, &self.dir, self.start_time));
        self.close();
        let allowance = (RING_COUNT * RING_SLOTS) as u64;
        self.final_passes = Some(FinalPasses { reason, wait_status, allowance, gaps: MAX_FINAL_GAPS, count: 0 });
    }

    /// Whether [`Self::end`] was called.
    pub(super) fn is_ending(&self) -> bool {
        self.final_passes.is_some()
    }

    /// Whether the final passes are complete.
    ///
    /// The number of passes is bounded: another process may still write to the rings, or a thread may have died in the
    /// middle of an event.
    pub(super) fn is_done(&self) -> bool {
        let Some(final_passes) = &self.final_passes else { return false };
        let PassResult { activity, stopped_early, out_of_place } = self.last_pass;
        let empty = final_passes.count > 0 && !stopped_early && out_of_place.is_none() && activity.slots == 0;
        empty || final_passes.count >= MAX_FINAL_PASSES || final_passes.allowance == 0
    }

    /// Closes the trace file and returns what is known about the recording.
    ///
    /// The remaining events are taken while `time` returns true. The rest is lost and counted.
    pub(super) fn finish(mut self, now: Duration, queue: &Queue, time: impl Fn() -> bool) -> Recorded {
        self.end("still running");
        while !self.is_done() && time() {
            queue.wait_for_room();
            self.pass(now, queue);
        }
        let counters = read_counters(&self.segment);
        let Process {
            pid,
            segment,
            dir,
            file,
            info,
            start_ns,
            rings,
            mut threads,
            mut merge,
            mut out,
            final_passes,
            ..
        } = self;
        let (reason, wait_status) = final_passes.map_or(("still running", None), |end| (end.reason, end.wait_status));
        out.limits.threads.give_back(threads.count() as u64);
        threads.refresh(&dir, now, true, &mut |d| out.launcher_definition(d, queue));
        if segment.header().is_attached.load(Ordering::Relaxed) != 0 {
            merge.skip_to(FIRST_LIVE_SEQ, &mut |e| out.event(e, queue));
        }
        let issued = segment.header().next_seq.0.load(Ordering::Acquire);
        merge.finish(issued, &mut |e| out.event(e, queue));
        out.batch.clock = Some(ClockPoint::read());
        out.batch.counters = Some(Box::new(counters));
        out.batch.flush = true;
        queue.write(out.key, &mut out.batch);
        let (lost, late) = (merge.lost() + u64::from(ended_in_first_allocation(&segment, &counters)), merge.late());
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

/// The state of a recording whose image writes no more.
#[derive(Debug)]
struct FinalPasses {
    reason: &'static str,
    wait_status: Option<i32>,
    /// The number of slots that may still be taken.
    allowance: u64,
    /// How many more times the gap before the events that were found may be given up.
    gaps: u32,
    /// The number of passes since the end that count toward [`MAX_FINAL_PASSES`].
    count: u32,
}

/// The flushes that the traced process, or inquiries, have requested. One is served at a time: the newest request includes earlier ones.
#[derive(Default, Debug)]
struct FlushRequests {
    /// The number of the last request whose events were taken from the rings.
    taken: u64,
    /// The request to serve next, and the number of the event before which all events belong to it.
    waiting: Option<(u64, u64)>,
}

impl FlushRequests {
    /// Reports a complete pass over the rings. Before it, `requested` was the newest request. `end` is the number after
    /// the last event that the pass has found.
    fn taken(&mut self, requested: u64, end: u64) {
        if requested > self.taken && self.waiting.is_none() {
            self.taken = requested;
            self.waiting = Some((requested, end));
        }
    }

    /// The request whose events have all been released, now that `next` is the number of the next event to release.
    fn ready(&mut self, next: u64) -> Option<u64> {
        self.waiting.take_if(|(_, end)| next >= *end).map(|(request, _)| request)
    }
}

/// The result of one pass over the rings.
#[derive(Clone, Copy, Default, Debug)]
struct PassResult {
    activity: Activity,
    /// Whether the pass stopped early, at its slot limit or because the writer was behind.
    stopped_early: bool,
    /// The smallest sequence number that stayed in its ring because the reorder window has no place for it yet.
    out_of_place: Option<u64>,
}

/// Receives the content of the rings during one pass.
struct PassIntake<'a> {
    dir: &'a ProcessDir,
    threads: &'a mut Threads,
    merge: &'a mut Merge,
    out: &'a mut Output,
    queue: &'a Queue,
    now: Duration,
    result: PassResult,
}

impl Intake for PassIntake<'_> {
    fn writer(&mut self, tid: u32, name: Option<&str>) -> ThreadId {
        let (out, queue) = (&mut *self.out, self.queue);
        if !self.threads.knows(tid) && !out.limits.threads.take(1) {
            return ThreadId::NONE;
        }
        self.threads.id(tid, name, self.dir, self.now, &mut |d| out.launcher_definition(d, queue))
    }

    fn has_room(&mut self) -> bool {
        let room = self.result.activity.slots < MAX_SLOTS_PER_PASS && self.queue.has_room();
        self.result.stopped_early |= !room;
        room
    }

    fn has_place(&mut self, seq: u64) -> bool {
        let has_place = self.merge.has_place(seq);
        if !has_place {
            let smallest = &mut self.result.out_of_place;
            *smallest = Some(smallest.map_or(seq, |other| other.min(seq)));
        }
        has_place
    }

    fn event(&mut self, event: Event) {
        let (out, queue) = (&mut *self.out, self.queue);
        self.merge.insert(event, &mut |e| out.event(e, queue));
    }

    fn definition(&mut self, bytes: &[u8]) {
        self.out.untrusted_definition(bytes, self.queue);
    }

    fn ring_done(&mut self, thread: ThreadId, slots: u64) {
        self.threads.active(thread);
        let activity = &mut self.result.activity;
        activity.slots += slots;
        activity.fullest = activity.fullest.max(slots);
    }
}

/// Whether the process ended inside its first allocation, before the event got its number or was counted as lost.
fn ended_in_first_allocation(segment: &Segment, counters: &CounterValues) -> bool {
    let header = segment.header();
    let is_counted = [Counter::EventsDropped, Counter::Reentered]
        .iter()
        .any(|counter| counters.get(*counter as usize).is_some_and(|count| *count > 0));
    header.makes_first_allocation.load(Ordering::Relaxed) != 0
        && header.next_seq.0.load(Ordering::Relaxed) == FIRST_SEQ
        && !is_counted
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

    #[test]
    fn a_request_is_served_when_its_events_are_released() {
        let mut requests = FlushRequests::default();
        requests.taken(0, 10);
        assert_eq!(requests.ready(10), None, "nothing was requested");
        requests.taken(1, 10);
        assert_eq!(requests.ready(9), None, "event 9 has not arrived");
        // A later request waits, because events 10 to 19 are not released yet.
        requests.taken(2, 20);
        assert_eq!(requests.ready(10), Some(1));
        assert_eq!(requests.ready(30), None);
        requests.taken(2, 20);
        assert_eq!((requests.ready(19), requests.ready(20), requests.ready(20)), (None, Some(2), None));
    }
}
