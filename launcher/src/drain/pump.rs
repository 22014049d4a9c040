//! The drain thread: accepts processes, empties their rings, notices their deaths.
//!
//! How often it looks: again at once when a ring was a quarter full, after 1 ms while anything comes, then less and less
//! often up to [`LAZIEST`]; with no process attached it sleeps until one knocks. A ring holds 8 ms of a million events a
//! second: a longer pause than [`LAZIEST`] would let a burst after a quiet moment fill it.
//!
//! A process gets one segment an image. A second request under the same pid means that the process has replaced itself (exec):
//! the first recording is finished and the next file is called `<pid>.1.mtr`.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use memtrace_analysis::RunFolder;
use memtrace_trace::shm::handshake;
use memtrace_trace::shm::layout::RING_SLOTS;
use memtrace_trace::shm::segment::Segment;

use super::door::{self, Door, Guest, Reason};
use super::limits::{Limits, Places};
use super::process::{Activity, Process};
use super::writer::{self, FileKey, Queue};
use super::{Outcome, Recorded, Written};
use crate::epoll::{Epoll, EventFd};

/// The longest pause between two looks while processes are attached.
const LAZIEST: Duration = Duration::from_millis(2);
/// Callers let in between two looks at the rings.
const ADMITTED_AT_ONCE: usize = 16;
/// Processes that may be recorded at once, and files one run may have.
const MAX_PROCESSES: usize = 4096;
/// See [`MAX_PROCESSES`].
const MAX_FILES: u32 = 65_536;
/// Images one process may have: it shall not use up all files of the run.
const MAX_IMAGES: u32 = 4096;
/// How long processes may outlive the command before their recording is closed.
const GRACE: Duration = Duration::from_millis(500);
/// How long it may then take to read what they have written, all together.
const LAST_WORDS: Duration = Duration::from_secs(5);

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const FIRST_ID: u64 = 16;

/// The running drain, as the rest of the launcher holds it.
#[derive(Debug)]
pub(crate) struct Drain {
    stop: EventFd,
    drain: JoinHandle<Drained>,
    writer: JoinHandle<Vec<Written>>,
}

/// What the drain thread leaves behind.
type Drained = (Vec<Recorded>, Vec<(&'static str, u64)>);

impl Drain {
    /// Starts both threads.
    pub(crate) fn start(listener: UnixListener, folder: Arc<RunFolder>) -> anyhow::Result<Drain> {
        listener.set_nonblocking(true).context("cannot prepare the socket")?;
        let epoll = Epoll::new().context("cannot create an epoll descriptor")?;
        let stop = EventFd::new().context("cannot create an event descriptor")?;
        epoll
            .add(listener.as_fd(), LISTENER)
            .and_then(|()| epoll.add(stop.as_fd(), STOP))
            .context("cannot watch the socket")?;
        let stopped = stop.try_clone().context("cannot create an event descriptor")?;
        let (queue, writer) = writer::start(folder)?;
        let pump = Pump::new(epoll, listener, stopped, queue);
        let drain = std::thread::Builder::new()
            .name("memtrace-drain".into())
            .spawn(move || pump.run())
            .context("cannot start a thread")?;
        Ok(Drain { stop, drain, writer })
    }

    /// The command has ended: processes that still run get a short grace, then everything is drained, written and closed.
    pub(crate) fn finish(self) -> anyhow::Result<Outcome> {
        self.stop.raise();
        let panicked = |_| anyhow::anyhow!("the drain thread panicked; the traces end at that point");
        let (recorded, refused) = self.drain.join().map_err(panicked)?;
        let written = self.writer.join().map_err(panicked)?;
        Ok(Outcome { recorded, written, refused })
    }
}

/// Time that passes only while we are awake: when the launcher is stopped and continued, nothing has grown old.
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

struct Pump {
    epoll: Epoll,
    door: Door,
    stop: EventFd,
    queue: Queue,
    clock: AwakeClock,
    processes: BTreeMap<u64, Process>,
    /// The process that was served last when the writer had no room for more: the others come first the next time.
    served_last: u64,
    /// Slots taken from all processes.
    taken: u64,
    next_id: u64,
    /// Files begun so far, by pid.
    generations: HashMap<u32, u32>,
    files: u32,
    limits: Limits,
    recorded: Vec<Recorded>,
    refused: Vec<(&'static str, u64)>,
}

impl Pump {
    fn new(epoll: Epoll, listener: UnixListener, stop: EventFd, queue: Queue) -> Pump {
        Pump {
            epoll,
            door: Door::new(listener),
            stop,
            queue,
            clock: AwakeClock { last: Instant::now(), awake: Duration::ZERO },
            processes: BTreeMap::new(),
            served_last: 0,
            taken: 0,
            next_id: FIRST_ID,
            generations: HashMap::new(),
            files: 0,
            limits: Limits::default(),
            recorded: Vec::new(),
            refused: Vec::new(),
        }
    }

    fn run(mut self) -> Drained {
        let mut pause = Duration::ZERO;
        let mut stop_at: Option<Instant> = None;
        let mut ready = Vec::new();
        loop {
            let watching = !self.processes.is_empty() || !self.door.is_quiet() || stop_at.is_some();
            self.epoll.wait(watching.then_some(pause), &mut ready);
            let mut dead = Vec::new();
            for &token in &ready {
                match token {
                    LISTENER => self.accept(),
                    STOP => {
                        self.stop.clear();
                        stop_at.get_or_insert_with(|| Instant::now() + GRACE);
                    }
                    id if self.door.knows(id) => self.hear(id),
                    id => dead.push(id),
                }
            }
            let silent = self.door.expire();
            self.refuse("no hello", silent as u64);
            let now = self.clock.now();
            let activity = self.drain(now);
            dead.extend(self.processes.iter().filter(|(_, p)| p.is_gone()).map(|(id, _)| *id));
            for id in dead {
                self.end(id, "exited");
            }
            let done: Vec<u64> = self.processes.iter().filter(|(_, p)| p.is_done()).map(|(id, _)| *id).collect();
            for id in done {
                self.finish(id, now, None);
            }
            if let Some(at) = stop_at
                && (self.processes.is_empty() && self.door.is_quiet() || Instant::now() >= at)
            {
                break;
            }
            pause = next_pause(pause, activity);
        }
        let now = self.clock.now();
        let until = Instant::now() + LAST_WORDS;
        let ids: Vec<u64> = self.processes.keys().copied().collect();
        for id in ids {
            self.finish(id, now, Some(until));
        }
        (self.recorded, self.refused)
    }

    fn drain(&mut self, now: Duration) -> Activity {
        let mut all = Activity::default();
        let mut places = Places::of(self.processes.values());
        let last = self.served_last;
        let order: Vec<u64> =
            self.processes.range(last + 1..).chain(self.processes.range(..=last)).map(|(id, _)| *id).collect();
        let mut room = true;
        for id in order {
            let Some(process) = self.processes.get_mut(&id) else { continue };
            let one = places.watch(process, &self.queue, |process| process.drain(now, &self.queue));
            if std::mem::replace(&mut room, self.queue.has_room()) {
                self.served_last = id;
            }
            self.taken += one.slots;
            process.tell_progress(self.taken);
            all.slots += one.slots;
            all.fullest = all.fullest.max(one.fullest);
            process.tick(now, &self.queue);
        }
        if !self.queue.has_room() {
            // The disk is behind, and something may have been left: look again soon, but let the writer work.
            return Activity { slots: 1, fullest: 0 };
        }
        all
    }

    fn refuse(&mut self, reason: Reason, times: u64) {
        match self.refused.iter_mut().find(|(r, _)| *r == reason) {
            Some((_, count)) => *count += times,
            None if times > 0 => self.refused.push((reason, times)),
            None => {}
        }
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn accept(&mut self) {
        // A few at a time: the listener stays readable while more are waiting, and the rings are emptied in between.
        for _ in 0..ADMITTED_AT_ONCE {
            let id = self.new_id();
            let Some(admitted) = self.door.admit(id, &self.epoll) else { return };
            if let Err(reason) = admitted {
                self.refuse(reason, 1);
            }
            // Mostly the hello is there already.
            self.hear(id);
        }
    }

    fn hear(&mut self, id: u64) {
        match self.door.hear(id) {
            Some(Ok(guest)) => {
                if let Err(reason) = self.greet(guest) {
                    self.refuse(reason, 1);
                }
            }
            Some(Err(reason)) => self.refuse(reason, 1),
            None => {}
        }
    }

    /// Gives a process that has said hello its segment, and starts to record it.
    fn greet(&mut self, guest: Guest) -> Result<(), Reason> {
        let Guest { socket, peer } = guest;
        // Somebody else may speak through a dead process's socket, and the dead one's number may be a third one's.
        if peer.is_gone() {
            return Err("gone before the answer");
        }
        let pid = peer.pid;
        let now = self.clock.now();
        let earlier: Vec<u64> = self.processes.iter().filter(|(_, p)| p.pid() == pid).map(|(id, _)| *id).collect();
        for id in earlier {
            self.end(id, "replaced by exec");
        }
        if self.processes.len() >= MAX_PROCESSES || self.files >= MAX_FILES {
            return Err("too many processes");
        }
        let generation = self.generations.get(&pid).copied().unwrap_or(0);
        if generation >= MAX_IMAGES {
            return Err("too many programs one after another in one process");
        }
        let (segment, fd) = Segment::create().map_err(|e| door::why(&e, "no shared memory"))?;
        let id = self.new_id();
        if let Some(pidfd) = &peer.pidfd {
            self.epoll.add(pidfd.as_fd(), id).map_err(|_| "no descriptors left")?;
        }
        handshake::send_fd(socket.as_fd(), fd.as_fd()).map_err(|_| "gone before the answer")?;
        let file = if generation == 0 { format!("{pid}.mtr") } else { format!("{pid}.{generation}.mtr") };
        self.generations.insert(pid, generation + 1);
        self.files += 1;
        let process = Process::start(peer, segment, FileKey(self.files), file, &self.queue, now, &self.limits);
        self.processes.insert(id, process);
        Ok(())
    }

    /// This image writes no more.
    fn end(&mut self, id: u64, reason: &'static str) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        process.end(reason);
        if let Some(pidfd) = process.pidfd() {
            self.epoll.remove(pidfd);
        }
    }

    /// The end of a process's file. One that goes on must be read by `until`.
    fn finish(&mut self, id: u64, now: Duration, until: Option<Instant>) {
        let Some(process) = self.processes.remove(&id) else { return };
        if let Some(pidfd) = process.pidfd() {
            self.epoll.remove(pidfd);
        }
        let until = until.filter(|_| !process.has_ended());
        let time = || until.is_none_or(|until| Instant::now() < until);
        self.recorded.push(process.finish(now, &self.queue, time));
    }
}

/// How long to sleep before the next look.
fn next_pause(pause: Duration, activity: Activity) -> Duration {
    if activity.fullest >= RING_SLOTS as u64 / 4 {
        Duration::ZERO
    } else if activity.slots > 0 {
        Duration::from_millis(1)
    } else {
        (pause + Duration::from_millis(1)).min(LAZIEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_often_when_there_is_much() {
        let activity = |slots, fullest| Activity { slots, fullest };
        assert_eq!(next_pause(LAZIEST, activity(9000, 2048)), Duration::ZERO);
        assert_eq!(next_pause(LAZIEST, activity(9000, 100)), Duration::from_millis(1));
        let mut pause = Duration::ZERO;
        for _ in 0..10 {
            pause = next_pause(pause, activity(0, 0));
        }
        assert_eq!(pause, LAZIEST);
    }
}
