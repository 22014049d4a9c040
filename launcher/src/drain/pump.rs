//! The drain thread: accepts processes, empties their rings, notices their deaths.
//!
//! How often it looks: again at once when a ring was a quarter full, after 1 ms while anything comes, then less and less
//! often up to [`LAZIEST`]; with no process attached it sleeps until one knocks. A ring holds 8 ms of a million events a
//! second: a longer pause than [`LAZIEST`] would let a burst after a quiet moment fill it.
//!
//! A process gets one segment an image. A second request under the same pid means that the process has replaced itself (exec):
//! the first recording is finished and the next file is called `<pid>.1.mtr`.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use memtrace_analysis::RunFolder;
use memtrace_trace::shm::handshake::{self, Hello};
use memtrace_trace::shm::layout::RING_SLOTS;
use memtrace_trace::shm::segment::Segment;

use super::process::{Activity, Process};
use super::writer::{self, FileKey, Queue};
use super::{Outcome, Recorded, Written};
use crate::epoll::{Epoll, EventFd};

/// The longest pause between two looks while processes are attached.
const LAZIEST: Duration = Duration::from_millis(2);
/// A client must say hello within this time.
const HELLO_WITHIN: Duration = Duration::from_secs(2);
/// Clients that may be in the middle of their hello.
const MAX_CLIENTS: usize = 256;
/// Processes that may be recorded at once, and files one run may have.
const MAX_PROCESSES: usize = 4096;
/// See [`MAX_PROCESSES`].
const MAX_FILES: u32 = 65_536;
/// How long processes may outlive the command before their recording is closed.
const GRACE: Duration = Duration::from_millis(500);

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

/// A client that has connected and not yet said hello.
struct Client {
    socket: UnixStream,
    deadline: Instant,
    hello: [u8; size_of::<Hello>()],
    read: usize,
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
    listener: UnixListener,
    stop: EventFd,
    queue: Queue,
    clock: AwakeClock,
    clients: HashMap<u64, Client>,
    processes: HashMap<u64, Process>,
    next_id: u64,
    /// Files begun so far, by pid.
    generations: HashMap<u32, u32>,
    files: u32,
    recorded: Vec<Recorded>,
    refused: Vec<(&'static str, u64)>,
}

impl Pump {
    fn new(epoll: Epoll, listener: UnixListener, stop: EventFd, queue: Queue) -> Pump {
        Pump {
            epoll,
            listener,
            stop,
            queue,
            clock: AwakeClock { last: Instant::now(), awake: Duration::ZERO },
            clients: HashMap::new(),
            processes: HashMap::new(),
            next_id: FIRST_ID,
            generations: HashMap::new(),
            files: 0,
            recorded: Vec::new(),
            refused: Vec::new(),
        }
    }

    fn run(mut self) -> Drained {
        let mut pause = Duration::ZERO;
        let mut stop_at: Option<Instant> = None;
        let mut ready = Vec::new();
        loop {
            let watching = !self.processes.is_empty() || !self.clients.is_empty() || stop_at.is_some();
            self.epoll.wait(watching.then_some(pause), &mut ready);
            let mut dead = Vec::new();
            for &token in &ready {
                match token {
                    LISTENER => self.accept(),
                    STOP => {
                        self.stop.clear();
                        stop_at.get_or_insert_with(|| Instant::now() + GRACE);
                    }
                    id if self.clients.contains_key(&id) => self.hear(id),
                    id => dead.push(id),
                }
            }
            self.expire_clients();
            let now = self.clock.now();
            let activity = self.drain(now);
            dead.extend(self.processes.iter().filter(|(_, p)| p.is_gone()).map(|(id, _)| *id));
            for id in dead {
                self.finish(id, "exited", now);
            }
            if let Some(at) = stop_at
                && (self.processes.is_empty() && self.clients.is_empty() || Instant::now() >= at)
            {
                break;
            }
            pause = next_pause(pause, activity);
        }
        let now = self.clock.now();
        let ids: Vec<u64> = self.processes.keys().copied().collect();
        for id in ids {
            self.finish(id, "still running", now);
        }
        (self.recorded, self.refused)
    }

    fn drain(&mut self, now: Duration) -> Activity {
        let mut all = Activity::default();
        for process in self.processes.values_mut() {
            let one = process.drain(now, &self.queue);
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

    fn refuse(&mut self, reason: &'static str) {
        match self.refused.iter_mut().find(|(r, _)| *r == reason) {
            Some((_, count)) => *count += 1,
            None => self.refused.push((reason, 1)),
        }
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn accept(&mut self) {
        // One at a time: the listener stays readable while more are waiting, and the rings are emptied in between.
        let Ok((socket, _)) = self.listener.accept() else { return };
        let Some(peer) = peer(socket.as_fd()) else { return self.refuse("peer unknown") };
        // SAFETY: a plain call.
        let ours = unsafe { libc::geteuid() };
        if peer.uid != ours && peer.uid != 0 {
            return self.refuse("another user");
        }
        if peer.pid <= 0 {
            return self.refuse("outside our pid namespace");
        }
        if self.clients.len() >= MAX_CLIENTS {
            return self.refuse("too many at once");
        }
        let id = self.new_id();
        if socket.set_nonblocking(true).and_then(|()| self.epoll.add(socket.as_fd(), id)).is_err() {
            return self.refuse("no descriptors left");
        }
        let deadline = Instant::now() + HELLO_WITHIN;
        self.clients.insert(id, Client { socket, deadline, hello: [0; size_of::<Hello>()], read: 0 });
        // Mostly the hello is there already.
        self.hear(id);
    }

    fn expire_clients(&mut self) {
        if self.clients.is_empty() {
            return;
        }
        let now = Instant::now();
        let before = self.clients.len();
        self.clients.retain(|_, c| c.deadline > now);
        for _ in self.clients.len()..before {
            self.refuse("no hello");
        }
    }

    fn hear(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Some(rest) = client.hello.get_mut(client.read..) else { return };
        match client.socket.read(rest) {
            Ok(0) => {
                self.clients.remove(&id);
                self.refuse("no hello");
            }
            Ok(n) => {
                client.read += n;
                if client.read == client.hello.len()
                    && let Some(client) = self.clients.remove(&id)
                {
                    self.greet(client);
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock || e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => {
                self.clients.remove(&id);
                self.refuse("no hello");
            }
        }
    }

    /// Gives a process that has said hello its segment, and starts to record it.
    fn greet(&mut self, client: Client) {
        if Hello::from_bytes(&client.hello).is_none() {
            return self.refuse("library of another build");
        }
        let Some(pid) = peer(client.socket.as_fd()).and_then(|p| u32::try_from(p.pid).ok()) else {
            return self.refuse("peer unknown");
        };
        let now = self.clock.now();
        let earlier: Vec<u64> = self.processes.iter().filter(|(_, p)| p.pid() == pid).map(|(id, _)| *id).collect();
        for id in earlier {
            self.finish(id, "replaced by exec", now);
        }
        if self.processes.len() >= MAX_PROCESSES || self.files >= MAX_FILES {
            return self.refuse("too many processes");
        }
        let pidfd = pidfd_open(pid).ok();
        let Ok((segment, fd)) = Segment::create() else { return self.refuse("no shared memory") };
        let id = self.new_id();
        if let Some(pidfd) = &pidfd
            && self.epoll.add(pidfd.as_fd(), id).is_err()
        {
            return self.refuse("no descriptors left");
        }
        if handshake::send_fd(client.socket.as_fd(), fd.as_fd()).is_err() {
            return self.refuse("gone before the answer");
        }
        let generation = self.generations.entry(pid).or_default();
        let file = if *generation == 0 { format!("{pid}.mtr") } else { format!("{pid}.{generation}.mtr") };
        *generation += 1;
        self.files += 1;
        let process = Process::start(pid, segment, pidfd, FileKey(self.files), file, &self.queue, now);
        self.processes.insert(id, process);
    }

    fn finish(&mut self, id: u64, reason: &'static str, now: Duration) {
        let Some(process) = self.processes.remove(&id) else { return };
        if let Some(pidfd) = process.pidfd() {
            self.epoll.remove(pidfd);
        }
        self.recorded.push(process.finish(reason, now, &self.queue));
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

/// Who is at the other end, as the kernel knows it.
fn peer(socket: BorrowedFd<'_>) -> Option<libc::ucred> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: an open socket, and a buffer of the length that is passed along.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut cred).cast(), &mut len)
    };
    (result == 0 && len as usize == size_of::<libc::ucred>()).then_some(cred)
}

fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: a plain call; the descriptor it returns is new, close-on-exec, and ours.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd as RawFd)) }
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

    #[test]
    fn the_peer_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        assert_eq!(peer(a.as_fd()).unwrap().pid as u32, std::process::id());
        assert!(pidfd_open(std::process::id()).is_ok());
    }
}
