//! Rotation of the traces (`memtrace run --keep`): drops the oldest events of a trace that has become too large or too
//! old.
//!
//! A process ([`super::rotation_worker`]) writes the new trace beside the old one (`.PID.mtr.part`), which goes on
//! meanwhile, and what the analysis remembers of the dropped events (`.PID.kept.jsonl.part`). Its priority is the
//! lowest one. If the old trace doubles meanwhile, the programs leave it too little time: then another one takes its
//! place, with the priority of the launcher, as all later ones of the run. A thread of its own waits for it. Then the
//! writer thread copies the few frames that are left, renames the two files over the old ones and goes on there:
//! `PID.kept.jsonl` first, since it fits both traces. One trace is rotated at a time. If anything fails, the old trace
//! stays as it is and grows.

use std::fs::File;
use std::process::Child;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use memtrace_analysis::rewrite::Keep;
use memtrace_analysis::{KeptState, RunFolder};
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::file::{Writer, copy_frames};

use rustix::process::{Pid, Signal, kill_process};

use super::rotation_worker::{self, Written, kept_state_part};
use super::truncated::TraceFile;
use crate::message;
use crate::option_values::Kept;
use crate::sandbox::Priority;

/// The thread copies until so few bytes are left for the writer thread. At a million events a second, the trace grows
/// by this much in a fraction of a second.
const REST: u64 = 1 << 20;
/// How often the thread copies at most. The trace may grow as fast as it copies.
const MAX_COPIES: u32 = 16;
/// The new trace leaves this much space on the disk, in bytes: the old one grows meanwhile, and other programs write
/// there. Of a small trace, an eighth of its length.
const SPARE_SPACE: u64 = 64 << 20;
/// The minimum of it.
const MIN_SPARE_SPACE: u64 = 1 << 20;
/// A trace is rotated when its oldest event is older than the limit by 25 % (1/4).
const SLACK: u32 = 4;

/// When one trace is rotated next.
#[derive(Debug)]
pub(super) struct Due {
    bytes: u64,
    at: Option<Instant>,
}

/// Rotates the traces of a run.
#[derive(Debug)]
pub(super) struct Rotator {
    folder: Arc<RunFolder>,
    kept: Kept,
    /// The clock when the run began. The rate of its ticks follows from it.
    began: ClockPoint,
    running: Option<Running>,
    /// That of the next process.
    priority: Priority,
    /// Whether a failure was reported.
    has_failed: bool,
}

#[derive(Debug)]
struct Running {
    /// The number of the trace file.
    file: u32,
    began: Instant,
    /// The length of the old trace then, in bytes.
    bytes: u64,
    worker: Arc<Worker>,
    thread: JoinHandle<anyhow::Result<Option<NewTrace>>>,
}

impl Running {
    /// Whether the process still runs, and the trace with this number, its own, has doubled since it began.
    fn has_doubled(&self, file: u32, bytes: u64) -> bool {
        self.file == file && bytes >= 2 * self.bytes && self.worker.is_running()
    }
}

/// The process that writes a new trace.
#[derive(Default, Debug)]
struct Worker(Mutex<State>);

/// The state of the process.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum State {
    #[default]
    NotStarted,
    Runs(Pid),
    Ended,
    Cancelled,
}

impl Worker {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the process. `None` if it was cancelled before.
    fn start(
        &self,
        part: &UnfinishedTrace,
        old: &File,
        new: &File,
        keep: Keep,
        limit: u64,
        priority: Priority,
    ) -> anyhow::Result<Option<Child>> {
        let mut state = self.state();
        if *state == State::Cancelled {
            return Ok(None);
        }
        let started = rotation_worker::start(&part.folder, &part.trace, old, new, keep, limit, priority);
        let child = started.context("cannot start a process")?;
        *state = Pid::from_raw(child.id() as i32).map_or(State::Ended, State::Runs);
        Ok(Some(child))
    }

    /// Waits for the process. `None` if there is nothing to drop, or if it was cancelled.
    fn wait(&self, mut child: Child) -> anyhow::Result<Option<Written>> {
        let written = rotation_worker::read(&mut child);
        let mut state = self.state();
        let was_cancelled = std::mem::replace(&mut *state, State::Ended) == State::Cancelled;
        // The process has ended, or is about to. Its number is valid until here.
        let status = child.wait();
        if was_cancelled { Ok(None) } else { rotation_worker::result(&written, status) }
    }

    fn is_running(&self) -> bool {
        matches!(*self.state(), State::Runs(_))
    }

    fn cancel(&self) {
        let mut state = self.state();
        if let State::Runs(pid) = *state {
            // Whoever waits for the process needs the state first, so this is still its number.
            let _ = kill_process(pid, Signal::KILL);
        }
        *state = State::Cancelled;
    }
}

/// A rotated trace that goes on where the old one does.
#[derive(Debug)]
struct NewTrace {
    part: UnfinishedTrace,
    old: File,
    copied_to: u64,
    /// The events that were dropped in all rotations, without those that the new trace has again.
    missing: u64,
}

/// The new trace, and the file beside it, before they have their names. Whichever does not get it is removed.
#[derive(Debug)]
struct UnfinishedTrace {
    folder: Arc<RunFolder>,
    /// The name of the trace.
    trace: String,
    file: File,
}

impl UnfinishedTrace {
    fn create(folder: &Arc<RunFolder>, trace: &str) -> std::io::Result<UnfinishedTrace> {
        let file = folder.create_replacing(trace_part(trace))?;
        Ok(UnfinishedTrace { folder: Arc::clone(folder), trace: trace.to_owned(), file })
    }

    /// Replaces the old files. A reader, or a crash, between the two finds a file that fits the old trace too.
    fn rename(&self) -> std::io::Result<()> {
        self.folder.rename(kept_state_part(&self.trace), KeptState::file_name(&self.trace))?;
        self.folder.rename(trace_part(&self.trace), &self.trace)
    }
}

impl Drop for UnfinishedTrace {
    fn drop(&mut self) {
        for name in [trace_part(&self.trace), kept_state_part(&self.trace)] {
            // A leftover is nothing to any reader.
            let _ = self.folder.remove(name);
        }
    }
}

fn trace_part(trace: &str) -> String {
    format!(".{trace}.part")
}

impl Rotator {
    pub(super) fn new(folder: Arc<RunFolder>, kept: Kept) -> Rotator {
        Rotator {
            folder,
            kept,
            began: ClockPoint::read(),
            running: None,
            priority: Priority::Lowest,
            has_failed: false,
        }
    }

    /// When a trace of `bytes` bytes is rotated next, whose oldest event is as old as `since`.
    pub(super) fn due(&self, bytes: u64, since: Instant) -> Due {
        match self.kept {
            // A trace whose state alone is large grows by half of the limit in between.
            Kept::Bytes(limit) => Due { bytes: limit.max(bytes + limit / 2), at: None },
            Kept::Time(limit) => Due { bytes: u64::MAX, at: Some(since + limit + limit / SLACK) },
        }
    }

    /// Begins to rotate a trace of `bytes` bytes, if it is due and no other one is being rotated.
    pub(super) fn start_if_due(&mut self, file: u32, name: &str, bytes: u64, due: &mut Due) {
        match &self.running {
            Some(running) if self.priority == Priority::Lowest && running.has_doubled(file, bytes) => {
                self.cancel(file);
                self.priority = Priority::Normal;
            }
            None if bytes >= due.bytes || due.at.is_some_and(|at| Instant::now() >= at) => {}
            _ => return,
        }
        let began = Instant::now();
        // Until the new trace is there, or if it cannot be written.
        *due = self.due(bytes, began);
        let (folder, name, kept) = (Arc::clone(&self.folder), name.to_owned(), self.kept);
        let (first_clock, priority, worker) = (self.began, self.priority, Arc::new(Worker::default()));
        let used = Arc::clone(&worker);
        let work = move || new_trace(&folder, &name, &kept, &first_clock, &used, priority);
        match std::thread::Builder::new().name("memtrace-rotate".into()).spawn(work) {
            Ok(thread) => self.running = Some(Running { file, began, bytes, worker, thread }),
            Err(e) => self.failed(&anyhow::Error::from(e).context("cannot start a thread")),
        }
    }

    fn limit(&self) -> Duration {
        match self.kept {
            Kept::Bytes(_) => Duration::ZERO,
            Kept::Time(limit) => limit,
        }
    }

    /// Whether a trace is being rotated.
    pub(super) fn is_rotating(&self) -> bool {
        self.running.is_some()
    }

    /// The number of the trace for which a new one is complete.
    pub(super) fn ready(&self) -> Option<u32> {
        self.running.as_ref().filter(|running| running.thread.is_finished()).map(|running| running.file)
    }

    /// Lets `writer` go on in the new trace, which is complete. Returns how many events it lacks, and when it is
    /// rotated next. `None` if the old trace stays.
    pub(super) fn switch(&mut self, writer: &mut Writer<TraceFile>) -> Option<(u64, Due)> {
        let running = self.running.take()?;
        let new = running.thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the thread panicked")));
        let switched = new.and_then(|new| match new {
            Some(new) => new.take_over(writer).map(Some),
            None => Ok(None),
        });
        match switched {
            Ok(missing) => {
                let since = running.began.checked_sub(self.limit()).unwrap_or(running.began);
                missing.map(|missing| (missing, self.due(writer.out().bytes(), since)))
            }
            Err(e) => {
                self.failed(&e);
                None
            }
        }
    }

    /// Gives up the rotation of a trace that ends.
    pub(super) fn cancel(&mut self, file: u32) {
        if let Some(running) = self.running.take_if(|running| running.file == file) {
            running.worker.cancel();
            // The old trace is complete, whatever became of the new one.
            drop(running.thread.join());
        }
    }

    fn failed(&mut self, error: &anyhow::Error) {
        if !std::mem::replace(&mut self.has_failed, true) {
            message::warning(&format!("cannot drop old events, so the trace grows: {error:#}"));
        }
    }
}

/// Writes the new trace as far as the old one goes. `None` if there is nothing to drop.
fn new_trace(
    folder: &Arc<RunFolder>,
    name: &str,
    kept: &Kept,
    first_clock: &ClockPoint,
    worker: &Worker,
    priority: Priority,
) -> anyhow::Result<Option<NewTrace>> {
    let old = folder.open_file(name).context("cannot open the trace")?;
    let keep = match *kept {
        Kept::Bytes(bytes) => Keep::Bytes(bytes / 2),
        Kept::Time(time) => Keep::Since(ticks_before(time, first_clock)),
    };
    let bytes = old.metadata().context("cannot read the trace")?.len();
    let space = rustix::fs::fstatvfs(&old).context("cannot read the free space of the disk")?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    // The new trace is shorter by what is dropped, which is not known before. The kernel enforces its limit.
    let limit = free.saturating_sub((bytes / 8).clamp(MIN_SPARE_SPACE, SPARE_SPACE));
    ensure!(limit > 0, "the disk has too little free space");
    let part = UnfinishedTrace::create(folder, name).context("cannot create the new trace")?;
    let mut out = part.file.try_clone()?;
    let Some(child) = worker.start(&part, &old, &out, keep, limit, priority)? else { return Ok(None) };
    let Some(Written { mut copied_to, missing }) = worker.wait(child)? else { return Ok(None) };
    for _ in 0..MAX_COPIES {
        let end = old.metadata().context("cannot read the trace")?.len();
        if end - copied_to <= REST {
            break;
        }
        let length = out.metadata().context("cannot read the new trace")?.len();
        ensure!(length + (end - copied_to) <= limit, "the disk has too little free space");
        copied_to = copy_frames(&old, copied_to, end, &mut out)?;
    }
    out.sync_data().context("cannot write the new trace")?;
    Ok(Some(NewTrace { part, old, copied_to, missing }))
}

/// The time `before` now, in clock ticks.
fn ticks_before(before: Duration, first: &ClockPoint) -> u64 {
    let now = ClockPoint::read();
    let ticks = now.ticks.saturating_sub(first.ticks) as f64;
    let ns = now.monotonic_ns.saturating_sub(first.monotonic_ns).max(1) as f64;
    now.ticks.saturating_sub((before.as_nanos() as f64 * ticks / ns) as u64)
}

impl NewTrace {
    /// Lets `writer` go on here. Returns how many events are missing.
    fn take_over(self, writer: &mut Writer<TraceFile>) -> anyhow::Result<u64> {
        let mut file = self.part.file.try_clone()?;
        writer.flush()?;
        let end = writer.out().bytes();
        let copied_to = copy_frames(&self.old, self.copied_to, end, &mut file)?;
        ensure!(copied_to == end, "the trace is damaged");
        let bytes = file.metadata().context("cannot read the new trace")?.len();
        self.part.rename().context("cannot rename the new trace")?;
        writer.continue_in(TraceFile::appending(file, bytes))?;
        Ok(self.missing)
    }
}
