//! The drain loop: accepts processes, empties their rings and notices when they end.
//!
//! The polling interval adapts. The loop polls again at once when a ring was a quarter full, and after 1 ms while
//! events arrive. Otherwise the interval grows up to [`MAX_PAUSE`]. Without an attached process the loop sleeps until
//! one connects. A ring holds 8 ms of events at a million events a second. An interval longer than [`MAX_PAUSE`] would
//! let a sudden burst fill it.
//!
//! Each process image gets one segment. A second request with the same pid means that the process called `exec`. The
//! loop then finishes the first recording, and the next file is named `<pid>.1.mtr`.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use memtrace_analysis::RunFolder;
use memtrace_trace::shm::handshake;
use memtrace_trace::shm::layout::RING_SLOTS;
use memtrace_trace::shm::run_lock::RunLock;
use memtrace_trace::shm::segment::Segment;

use super::acceptor::{Acceptor, Asked, Client, refusal_reason};
use super::inquiries::Inquiries;
use super::limits::Limits;
use super::pass_result::Activity;
use super::process::{Described, Process, Started};
use super::refusal::RefusalReason;
use super::trace_files::TraceFiles;
use super::window_limit::WindowLimit;
use super::writer::{self, Queue};
use super::{Outcome, Recorded, Written};
use crate::control::{Answer, RecordedProcess, Request};
use crate::epoll::{Epoll, EventFd};
use crate::host;
use crate::metrics::Figures;
use crate::option_values::Kept;

/// The longest pause between two passes over the rings while processes are attached.
const MAX_PAUSE: Duration = Duration::from_millis(2);
/// The maximum number of connections accepted between two passes over the rings.
const MAX_ACCEPTS_PER_PASS: usize = 16;
/// The maximum number of processes recorded at the same time.
const MAX_PROCESSES: usize = 4096;
/// How long processes may outlive the command before their recording is closed.
const GRACE_PERIOD: Duration = Duration::from_millis(500);
/// How long a process that memtrace has attached to may take to end its recording. It usually takes a fraction of a
/// second.
const DETACH_PERIOD: Duration = Duration::from_secs(5);
/// How long the final reads may take after [`GRACE_PERIOD`], over all processes that still run.
const FINAL_READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a recording ended whose process goes on without memtrace.
const DETACHED: &str = "detached";

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const LAST_RESERVED_TOKEN: u64 = 16;

/// A handle to the running drain and writer threads.
#[derive(Debug)]
pub(crate) struct Drain {
    stop: EventFd,
    drain: JoinHandle<Drained>,
    is_state_known: Arc<AtomicBool>,
    writer: JoinHandle<Vec<Written>>,
}

/// The results of the drain thread.
#[derive(Default)]
struct Drained {
    recorded: Vec<Recorded>,
    /// The number of refused requests, by reason.
    refused: Vec<(RefusalReason, u64)>,
}

impl Drained {
    fn refuse(&mut self, reason: RefusalReason, times: u64) {
        match self.refused.iter_mut().find(|(r, _)| *r == reason) {
            Some((_, count)) => *count += times,
            None if times > 0 => self.refused.push((reason, times)),
            None => {}
        }
    }
}

impl Drain {
    /// Starts the drain thread and the writer thread. `listener` accepts the connections of traced processes.
    ///
    /// With `figures`, the current figures of each process are kept there. With `kept`, the traces are rotated. Fails
    /// when a descriptor or a thread cannot be created.
    pub(crate) fn start(
        listener: UnixListener,
        folder: Arc<RunFolder>,
        figures: Option<Figures>,
        kept: Option<Kept>,
    ) -> anyhow::Result<Drain> {
        listener.set_nonblocking(true).context("cannot prepare the socket")?;
        let epoll = Epoll::new().context("cannot create an epoll descriptor")?;
        let stop = EventFd::new().context("cannot create an event descriptor")?;
        epoll
            .add(listener.as_fd(), LISTENER)
            .and_then(|()| epoll.add(stop.as_fd(), STOP))
            .context("cannot watch the socket")?;
        let stopped = stop.try_clone().context("cannot create an event descriptor")?;
        let path =
            std::path::absolute(folder.path()).context("cannot determine the absolute path of the run folder")?;
        let (queue, writer) = writer::start(folder, kept)?;
        let address = path.to_string_lossy().into_owned();
        let is_state_known = Arc::new(AtomicBool::new(false));
        let is_known = Arc::clone(&is_state_known);
        let sources =
            EventSources { epoll, acceptor: Acceptor::new(listener), stop: stopped, last_token: LAST_RESERVED_TOKEN };
        let drain_loop = DrainLoop { figures, is_state_known: is_known, ..DrainLoop::new(sources, queue, address) };
        let drain = std::thread::Builder::new()
            .name("memtrace-drain".into())
            .spawn(move || drain_loop.run())
            .context("cannot start a thread")?;
        Ok(Drain { stop, drain, is_state_known, writer })
    }

    /// Whether the state of a process that memtrace has attached to is known, so that its events follow.
    pub(crate) fn is_state_known(&self) -> bool {
        self.is_state_known.load(Ordering::Acquire)
    }

    /// Stops recording after the command has ended and returns the results.
    ///
    /// Processes that still run get a short grace period. Then everything is drained, written and closed. Fails when
    /// one of the threads panicked.
    pub(crate) fn finish(self) -> anyhow::Result<Outcome> {
        self.stop.raise();
        let panicked = |_| anyhow::anyhow!("the drain thread panicked; the traces end at that point");
        let Drained { recorded, refused } = self.drain.join().map_err(panicked)?;
        let written = self.writer.join().map_err(panicked)?;
        Ok(Outcome { recorded, written, refused })
    }
}

/// A clock that advances only while the launcher runs. Stopping and continuing the launcher makes no event overdue.
struct AwakeClock {
    last: Instant,
    awake: Duration,
}

impl AwakeClock {
    fn now(&mut self) -> Duration {
        let now = Instant::now();
        self.awake += now.duration_since(self.last).min(Duration::from_millis(100));
        self.last = now;
        self.awake
    }
}

/// The descriptors that the loop waits for. Each has a token.
struct EventSources {
    epoll: Epoll,
    acceptor: Acceptor,
    stop: EventFd,
    /// The token of the newest connection or process.
    last_token: u64,
}

impl EventSources {
    fn new_token(&mut self) -> u64 {
        self.last_token += 1;
        self.last_token
    }

    /// Accepts the next waiting connection under a new token.
    fn accept(&mut self) -> Option<(u64, Result<(), RefusalReason>)> {
        let token = self.new_token();
        Some((token, self.acceptor.accept(token, &self.epoll)?))
    }
}

/// The processes that are being recorded, and the order in which their rings are emptied.
struct Processes {
    /// By token.
    by_id: BTreeMap<u64, Process>,
    /// The id of the process served last when the writer's queue was full. The next pass starts after it.
    served_last: u64,
    /// The number of slots taken from all processes.
    taken: u64,
}

impl Processes {
    fn ids(&self, is_selected: impl Fn(&Process) -> bool) -> Vec<u64> {
        self.by_id.iter().filter(|(_, process)| is_selected(process)).map(|(id, _)| *id).collect()
    }

    /// Empties the rings of all processes, from the one after [`Self::served_last`].
    fn drain(&mut self, now: Duration, queue: &Queue) -> Activity {
        let mut all = Activity::default();
        let mut window_limit = WindowLimit::of(self.by_id.values());
        let last = self.served_last;
        let order: Vec<u64> =
            self.by_id.range(last + 1..).chain(self.by_id.range(..=last)).map(|(id, _)| *id).collect();
        let mut had_room = true;
        for id in order {
            let Some(process) = self.by_id.get_mut(&id) else { continue };
            let one = window_limit.update(process, queue, |process| process.drain(now, queue));
            if std::mem::replace(&mut had_room, queue.has_room()) {
                self.served_last = id;
            }
            self.taken += one.slots;
            process.publish_progress(self.taken);
            all.slots += one.slots;
            all.fullest = all.fullest.max(one.fullest);
            process.tick(now, queue);
        }
        if !queue.has_room() {
            // The writer is behind, and slots may be left in the rings. Poll again soon, but let the writer work.
            return Activity { slots: 1, fullest: 0 };
        }
        all
    }
}

struct DrainLoop {
    sources: EventSources,
    /// The lock for allocations under a limit. `None` if it could not be created: then they are made without it.
    run_lock: Option<(RunLock, OwnedFd)>,
    queue: Queue,
    clock: AwakeClock,
    processes: Processes,
    files: TraceFiles,
    limits: Limits,
    figures: Option<Figures>,
    is_state_known: Arc<AtomicBool>,
    drained: Drained,
    /// The absolute path of the run folder, for other memtrace commands.
    folder: String,
    inquiries: Inquiries,
}

impl DrainLoop {
    fn new(sources: EventSources, queue: Queue, folder: String) -> DrainLoop {
        DrainLoop {
            sources,
            run_lock: RunLock::create().ok(),
            queue,
            clock: AwakeClock { last: Instant::now(), awake: Duration::ZERO },
            processes: Processes { by_id: BTreeMap::new(), served_last: 0, taken: 0 },
            files: TraceFiles::default(),
            limits: Limits::default(),
            figures: None,
            is_state_known: Arc::default(),
            drained: Drained::default(),
            folder,
            inquiries: Inquiries::default(),
        }
    }

    fn run(mut self) -> Drained {
        let mut pause = Duration::ZERO;
        let mut stop_at: Option<Instant> = None;
        let mut ready = Vec::new();
        loop {
            let polls = !self.processes.by_id.is_empty()
                || !self.sources.acceptor.is_idle()
                || self.inquiries.is_waiting()
                || stop_at.is_some();
            self.sources.epoll.wait(polls.then_some(pause), &mut ready);
            let mut ended = Vec::new();
            for &token in &ready {
                match token {
                    LISTENER => self.accept(),
                    STOP => {
                        self.sources.stop.clear();
                        let is_attached = self.processes.by_id.values().any(Process::is_attached);
                        let period = if is_attached { DETACH_PERIOD } else { GRACE_PERIOD };
                        stop_at.get_or_insert_with(|| Instant::now() + period);
                        self.processes.by_id.values().for_each(Process::request_detach);
                    }
                    id if self.sources.acceptor.has_pending(id) => self.read_hello(id),
                    id => ended.push(id),
                }
            }
            let silent = self.sources.acceptor.close_expired();
            self.drained.refuse(RefusalReason::IncompleteRequest, silent as u64);
            let now = self.clock.now();
            let activity = self.processes.drain(now, &self.queue);
            ended.extend(self.processes.ids(Process::has_exited));
            for id in ended {
                self.end(id, "exited");
            }
            let detached = self.processes.ids(|process| process.is_detached() && !process.is_ending());
            if self.processes.by_id.values().any(Process::is_state_known) {
                self.is_state_known.store(true, Ordering::Release);
            }
            for id in detached {
                self.end(id, DETACHED);
            }
            for id in self.processes.ids(Process::is_done) {
                self.finish(id, now, None);
            }
            self.answer_inquiries();
            if let Some(at) = stop_at
                && (self.processes.by_id.is_empty() && self.sources.acceptor.is_idle() || Instant::now() >= at)
            {
                break;
            }
            pause = next_pause(pause, activity);
        }
        let now = self.clock.now();
        let until = Instant::now() + FINAL_READ_TIMEOUT;
        for id in self.processes.ids(|_| true) {
            self.finish(id, now, Some(until));
        }
        self.drained
    }

    fn accept(&mut self) {
        // Accept only a few connections in one pass, so that the rings are emptied in between. The listener stays
        // readable while more connections wait.
        for _ in 0..MAX_ACCEPTS_PER_PASS {
            let Some((id, accepted)) = self.sources.accept() else { return };
            if let Err(reason) = accepted {
                self.drained.refuse(reason, 1);
            }
            // Usually the hello message has already arrived.
            self.read_hello(id);
        }
    }

    fn read_hello(&mut self, id: u64) {
        match self.sources.acceptor.read_hello(id) {
            Some(Ok(Asked::Inquire(socket, request))) => self.inquire(socket, request),
            Some(Ok(Asked::Record(client))) => {
                if let Err(reason) = self.start_recording(client) {
                    self.drained.refuse(reason, 1);
                }
            }
            Some(Err(reason)) => self.drained.refuse(reason, 1),
            None => {}
        }
    }

    /// Handles a request of another memtrace command.
    fn inquire(&mut self, socket: UnixStream, request: Request) {
        // The other end may close the connection before it gets an answer.
        self.sources.epoll.remove(socket.as_fd());
        let files = match request {
            Request::Describe => Vec::new(),
            Request::WriteOut => self.processes.by_id.values().map(|process| Arc::clone(process.progress())).collect(),
        };
        let number = self.inquiries.add(socket, files);
        if request == Request::WriteOut {
            self.processes.by_id.values_mut().for_each(|process| process.write_out(number));
        }
    }

    fn answer_inquiries(&mut self) {
        let DrainLoop { inquiries, processes, folder, .. } = self;
        inquiries.answer(|| Answer {
            pid: std::process::id(),
            folder: folder.clone(),
            processes: processes
                .by_id
                .values()
                .map(|process| RecordedProcess { pid: process.pid(), trace: process.file().to_owned() })
                .collect(),
        });
    }

    /// Sends a segment to a process whose hello was valid, and starts to record it.
    fn start_recording(&mut self, client: Client) -> Result<(), RefusalReason> {
        let Client { socket, peer } = client;
        // Another process may use the socket of an ended one, and the pid may belong to a third process by now.
        if peer.has_exited() {
            return Err(RefusalReason::ProcessEnded);
        }
        let pid = peer.pid;
        let now = self.clock.now();
        for id in self.processes.ids(|process| process.pid() == pid) {
            self.end(id, "replaced by exec");
        }
        if self.processes.by_id.len() >= MAX_PROCESSES || self.files.is_full() {
            return Err(RefusalReason::TooManyProcesses);
        }
        let image = self.files.next_image(pid)?;
        let (segment, fd) = Segment::create().map_err(|e| refusal_reason(&e, RefusalReason::NoSharedMemory))?;
        let id = self.sources.new_token();
        if let Some(pidfd) = &peer.pidfd {
            self.sources.epoll.add(pidfd.as_fd(), id).map_err(|_| RefusalReason::NoDescriptors)?;
        }
        segment.header().trace_pid.store(pid, Ordering::Relaxed);
        segment.header().trace_image.store(image, Ordering::Relaxed);
        // Before the process can write events, or end.
        let (described, start_ns) = (Described::of(pid), host::epoch_ns());
        handshake::send_fd(socket.as_fd(), fd.as_fd()).map_err(|_| RefusalReason::ProcessEnded)?;
        if let Some((_, fd)) = &self.run_lock {
            // A process that does not receive it allocates without the lock.
            let _ = handshake::send_fd(socket.as_fd(), fd.as_fd());
        }
        let file = self.files.start(pid, image);
        let figures = self.figures.as_ref();
        let started = Started { peer, described, segment, start_ns };
        let process = Process::start(started, file, &self.queue, now, &self.limits, figures);
        self.processes.by_id.insert(id, process);
        Ok(())
    }

    /// Ends the recording of an image that writes no more.
    fn end(&mut self, id: u64, reason: &'static str) {
        let Some(process) = self.processes.by_id.get_mut(&id) else { return };
        // An earlier image or process of this id ends before a later one gets its segment. So what has this id is gone.
        if let Some((lock, _)) = self.run_lock.as_ref().filter(|_| !process.is_ending() && reason != DETACHED) {
            lock.release_of_ended(process.pid());
        }
        process.end(reason);
        if let Some(pidfd) = process.pidfd() {
            self.sources.epoll.remove(pidfd);
        }
    }

    /// Closes a process's trace file. A process that still runs must be read by `until`.
    fn finish(&mut self, id: u64, now: Duration, until: Option<Instant>) {
        let Some(process) = self.processes.by_id.remove(&id) else { return };
        if let Some(pidfd) = process.pidfd() {
            self.sources.epoll.remove(pidfd);
        }
        let until = until.filter(|_| !process.is_ending());
        let time = || until.is_none_or(|until| Instant::now() < until);
        self.drained.recorded.push(process.finish(now, &self.queue, time));
    }
}

/// The time to sleep before the next pass over the rings.
fn next_pause(pause: Duration, activity: Activity) -> Duration {
    if activity.fullest >= RING_SLOTS as u64 / 4 {
        Duration::ZERO
    } else if activity.slots > 0 {
        Duration::from_millis(1)
    } else {
        (pause + Duration::from_millis(1)).min(MAX_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_adapt_to_the_activity() {
        let activity = |slots, fullest| Activity { slots, fullest };
        assert_eq!(next_pause(MAX_PAUSE, activity(9000, 2048)), Duration::ZERO);
        assert_eq!(next_pause(MAX_PAUSE, activity(9000, 100)), Duration::from_millis(1));
        let mut pause = Duration::ZERO;
        for _ in 0..10 {
            pause = next_pause(pause, activity(0, 0));
        }
        assert_eq!(pause, MAX_PAUSE);
    }
}
