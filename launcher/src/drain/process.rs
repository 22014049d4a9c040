//! The recording of one traced process image: its shared segment, its rings, the event order and the pending output.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use memtrace_analysis::load::Workload;
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::counters::{COUNTER_SLOTS, Counter, CounterValues};
use memtrace_trace::event::Event;
use memtrace_trace::file::End;
use memtrace_trace::ids::ThreadId;
use memtrace_trace::shm::layout::{FIRST_LIVE_SEQ, FIRST_SEQ};
use memtrace_trace::shm::segment::Segment;
use serde_json::Value;

use super::acceptor::Peer;
use super::exit_status;
use super::final_passes::FinalPasses;
use super::flushes::Flushes;
use super::limits::Limits;
use super::merge::Merge;
use super::output::{LiveFigures, Output};
use super::pass_result::{Activity, PassResult};
use super::rings::{Intake, Rings};
use super::threads::Threads;
use super::writer::{FileKey, FileProgress, Queue};
use super::{ReceivedCounts, Recorded};
use crate::host;
use crate::metrics::Figures;
use crate::proc::ProcessDir;

/// Slots taken from one process before the drain loop serves the next one: about 5 ms of work.
const MAX_SLOTS_PER_PASS: u64 = 1 << 16;
/// The identity of a traced process image.
#[derive(Debug)]
struct Image {
    pid: u32,
    /// Becomes readable when the process has ended. `None` on kernels before 5.3, where [`Process::has_exited`] polls
    /// `/proc`.
    pidfd: Option<OwnedFd>,
    dir: ProcessDir,
    /// The start time from `/proc`. Together with the pid it identifies the process uniquely.
    start_time: Option<u64>,
    /// The name of its trace file.
    file: String,
    info: Value,
    start_ns: u64,
}

/// A traced process image that is being recorded.
#[derive(Debug)]
pub(super) struct Process {
    image: Image,
    segment: Segment,
    rings: Rings,
    threads: Threads,
    merge: Merge,
    out: Output,
    flushes: Flushes,
    /// The result of the last pass over the rings.
    last_pass: PassResult,
    final_passes: Option<FinalPasses>,
}

/// Facts about a process from `/proc`.
#[derive(Debug)]
pub(super) struct Described {
    dir: ProcessDir,
    start_time: Option<u64>,
    workload: Workload,
    info: Value,
}

impl Described {
    /// Reads it. `/proc` has less of a process that has ended, so this comes before a process gets its segment.
    pub(super) fn of(pid: u32) -> Described {
        let dir = ProcessDir::of(pid);
        let workload = dir.workload(pid);
        Described { start_time: dir.start_time(), info: dir.info(pid, &workload), workload, dir }
    }
}

/// A process that has received its segment, and may already write into it.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) peer: Peer,
    pub(super) described: Described,
    pub(super) segment: Segment,
    /// When it received the segment, in nanoseconds since the Unix epoch: no event is older.
    pub(super) start_ns: u64,
}

impl Process {
    /// Starts to record this process into a new file.
    ///
    /// `now` is the awake time of the drain loop. `key` and `file` identify the trace file to the writer. With
    /// `figures`, the current figures of the process are kept there.
    pub(super) fn start(
        started: Started,
        (key, file): (FileKey, String),
        queue: &Queue,
        now: Duration,
        limits: &Limits,
        figures: Option<&Figures>,
    ) -> Process {
        let Started { peer: Peer { pid, pidfd }, described, segment, start_ns } = started;
        let Described { dir, start_time, workload, mut info } = described;
        let text = info.to_string();
        if !limits.kept_text.take(text.len() as u64) {
            // The manifest goes without the info object. The trace file still contains all of it.
            info = Value::Null;
        }
        let progress = queue.open(key, file.clone(), text);
        let figures = figures.map(|figures| LiveFigures::start(figures, pid, file.clone(), &workload));
        let mut out = Output::new(key, limits.clone(), figures);
        // Send the first clock point at once. The next point would replace it, and a short process would have only one.
        out.send(queue);
        Process {
            image: Image { pid, pidfd, dir, start_time, file, info, start_ns },
            segment,
            rings: Rings::default(),
            threads: Threads::default(),
            merge: Merge::default(),
            out,
            flushes: Flushes::new(progress, now),
            last_pass: PassResult::default(),
            final_passes: None,
        }
    }

    /// The process id in the launcher's pid namespace.
    pub(super) fn pid(&self) -> u32 {
        self.image.pid
    }

    /// The name of the trace file inside the run folder.
    pub(super) fn file(&self) -> &str {
        &self.image.file
    }

    /// The writer's progress with the trace file.
    pub(super) fn progress(&self) -> &Arc<FileProgress> {
        self.flushes.progress()
    }

    /// Writes out for inquiry `number` what the process has published until now.
    pub(super) fn write_out(&mut self, number: u64) {
        self.flushes.inquire(number);
    }

    /// The descriptor that becomes readable when the process ends. `None` on kernels before 5.3.
    pub(super) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.image.pidfd.as_ref().map(|fd| fd.as_fd())
    }

    /// Whether `/proc` shows that the process has ended. Always false when there is a pidfd, which reports the end
    /// itself.
    pub(super) fn has_exited(&self) -> bool {
        let Image { pidfd, dir, start_time, .. } = &self.image;
        pidfd.is_none() && (start_time.is_none() || dir.start_time() != *start_time || dir.state() == Some('Z'))
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
        if self.flushes.has_failed() {
            self.close();
        }
        let requested = self.segment.header().flushes_requested.0.load(Ordering::Acquire);
        // Acquire: this pass then sees all events that the process has published before.
        let prior_state_end = self.segment.header().prior_state_end.load(Ordering::Acquire);
        let Process { segment, image, rings, threads, merge, out, .. } = self;
        let result = PassResult::default();
        let mut pass = PassIntake { dir: &image.dir, threads, merge, out, queue, now, result };
        rings.drain(segment, &mut pass);
        let result = pass.result;
        self.last_pass = result;
        self.pass_prior_state(prior_state_end, queue);
        if !self.last_pass.stopped_early && self.last_pass.out_of_place.is_none() {
            self.flushes.pass_completed(requested, self.merge.end());
        }
        let gap = self.final_passes.as_mut().and_then(|final_passes| final_passes.passed(&self.last_pass));
        if let Some(seq) = gap {
            let Process { merge, out, .. } = self;
            merge.give_up_below(seq, &mut |e| out.event(e, queue));
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
            // SAFETY: the word is in the segment, which is mapped. The process waits for the same word of the shared
            // file.
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
        let Process { segment, image, threads, merge, out, flushes, .. } = self;
        merge.tick(now, &mut |e| out.event(e, queue));
        let has_data = !out.batch.is_empty() || out.unflushed;
        let Some(due) = flushes.due(now, merge.next(), has_data) else { return };
        (out.batch.request, out.batch.inquiry) = (due.request, due.inquiry);
        threads.refresh(&image.dir, now, false, &mut |d| out.launcher_definition(d, queue));
        if due.with_clock {
            out.batch.clock = Some(ClockPoint::read());
        }
        if due.with_counters {
            out.batch.counters = Some(Box::new(read_counters(segment)));
        }
        out.batch.flush = true;
        out.follow();
        queue.write(out.key, &mut out.batch);
        out.unflushed = false;
    }

    /// Publishes the total number of slots that the drain loop has taken from all processes.
    ///
    /// A thread that waits for space in its ring reads this number. As long as it rises, waiting makes sense. Also
    /// publishes which requested flushes have reached the file.
    pub(super) fn publish_progress(&self, taken: u64) {
        let header = self.segment.header();
        header.taken.0.store(taken, Ordering::Relaxed);
        header.flushes_done.store(self.flushes.served(), Ordering::Release);
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
        let Image { dir, start_time, .. } = &self.image;
        let wait_status = self.pidfd().and_then(|fd| exit_status::wait_status(fd, dir, *start_time));
        self.close();
        self.final_passes = Some(FinalPasses::begin(reason, wait_status));
    }

    /// Whether [`Self::end`] was called.
    pub(super) fn is_ending(&self) -> bool {
        self.final_passes.is_some()
    }

    /// Whether the final passes are complete.
    pub(super) fn is_done(&self) -> bool {
        self.final_passes.as_ref().is_some_and(|final_passes| final_passes.are_complete(&self.last_pass))
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
            image: Image { pid, dir, file, info, start_ns, .. },
            segment,
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
            received: ReceivedCounts {
                events: out.events,
                lost,
                late,
                corrupt: rings.corrupt(),
                definitions_refused: out.definitions_refused,
            },
            counters,
            notices: out.notices,
            rank: out.rank,
        }
    }
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
