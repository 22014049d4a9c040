//! The thread that serves all connections.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{Resource, getrlimit};

use super::answer::{Answer, Reply};
use super::connection::{Connection, Progress};
use super::listener::Listener;
use super::request::{Content, Request};
use crate::epoll::EventFd;

/// The maximum number of connections at a time.
const MAX_CONNECTIONS: usize = 16;
/// The number of descriptors that connections leave to the rest of the process: to recording.
const RESERVED_DESCRIPTORS: u64 = 64;
/// The maximum number of answers that are computed or wait for it.
const MAX_WORK: usize = 2;
/// How long the server accepts nothing after it could not.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a server answers.
pub(crate) trait Site: Send + 'static {
    /// The headers of every answer, beside those that each answer has.
    fn headers(&self) -> &[(&'static str, String)];

    /// The refusal of a request whose sender may get nothing. Nothing else of it is looked at then.
    fn refusal(&self, request: &Request) -> Option<Answer>;

    /// Answers a request without a body. It must not take long.
    fn reply(&mut self, request: &Request) -> Reply;
}

/// A running server. It ends with this value, and closes all connections.
#[derive(Debug)]
pub(crate) struct Server {
    wake: EventFd,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts to answer. The threads are named after `name`, and inherit the signal mask.
    pub(crate) fn start(listener: Listener, site: impl Site, name: &str) -> io::Result<Server> {
        let wake = EventFd::new()?;
        let is_over = Arc::<AtomicBool>::default();
        let (answers, computed) = unbounded();
        let work = Work { name: format!("{name}-work"), tasks: None, pending: Arc::default(), answers };
        let serving = Serving {
            wake: wake.try_clone()?,
            is_over: Arc::clone(&is_over),
            listener,
            site,
            connections: Vec::with_capacity(MAX_CONNECTIONS),
            accepted: 0,
            paused_until: None,
            work,
            computed,
        };
        let thread = Some(Builder::new().name(name.to_owned()).spawn(move || serving.run())?);
        Ok(Server { wake, is_over, thread })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        self.wake.raise();
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

/// An answer that was computed for the connection with this number.
type Computed = (u64, Answer);

/// The state of the thread.
struct Serving<S> {
    wake: EventFd,
    is_over: Arc<AtomicBool>,
    listener: Listener,
    site: S,
    connections: Vec<Connection>,
    /// The number of connections so far.
    accepted: u64,
    /// Nothing is accepted until then.
    paused_until: Option<Instant>,
    work: Work,
    computed: Receiver<Computed>,
}

impl<S: Site> Serving<S> {
    fn run(mut self) {
        while !self.is_over.load(Ordering::Acquire) {
            let ready = self.wait();
            let now = Instant::now();
            self.connections.retain(|connection| connection.deadline().is_none_or(|deadline| deadline > now));
            ready.iter().for_each(|number| self.advance(*number, now));
            while let Ok((number, answer)) = self.computed.try_recv() {
                self.answer(number, &answer, now);
            }
            self.accept(now);
        }
    }

    /// Waits until something can be done, and returns the numbers of the connections that are ready.
    fn wait(&mut self) -> Vec<u64> {
        let now = Instant::now();
        self.paused_until = self.paused_until.filter(|until| *until > now);
        let deadlines = self.connections.iter().filter_map(Connection::deadline).chain(self.paused_until);
        let timeout = deadlines.min().map(|deadline| deadline.saturating_duration_since(now));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let accepts = if self.paused_until.is_none() { PollFlags::IN } else { PollFlags::empty() };
        let sources = [(self.wake.as_fd(), PollFlags::IN), (self.listener.as_fd(), accepts)];
        let connections = self.connections.iter().map(|connection| (connection.as_fd(), connection.interest()));
        let mut fds: Vec<PollFd<'_>> =
            sources.into_iter().chain(connections).map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)).collect();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Vec::new(),
            // The kernel has no memory.
            Err(_) => {
                std::thread::sleep(ACCEPT_PAUSE);
                return Vec::new();
            }
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        if fds.first().is_some_and(is_ready) {
            self.wake.clear();
        }
        let connections = self.connections.iter().zip(fds.iter().skip(sources.len()));
        connections.filter(|(_, fd)| is_ready(fd)).map(|(connection, _)| connection.number()).collect()
    }

    /// Reads or writes on a connection what is possible now.
    fn advance(&mut self, number: u64, now: Instant) {
        let Some(connection) = self.connections.iter_mut().find(|connection| connection.number() == number) else {
            return;
        };
        let answer = match connection.advance(now) {
            Progress::Pending => return,
            Progress::Over => return self.close(number),
            Progress::Refused(431) => Answer::text(431, "the head of the request is too long"),
            Progress::Refused(status) => Answer::text(status, "this is no request of HTTP/1.1"),
            Progress::Request(request, content) => match self.reply(&request, content) {
                Reply::Now(answer) => answer,
                Reply::Later(task) => match self.work.begin(number, task, &self.wake) {
                    true => return,
                    false => Answer::text(503, "other requests are being answered"),
                },
            },
        };
        self.answer(number, &answer, now);
    }

    fn reply(&mut self, request: &Request, content: Content) -> Reply {
        let refusal = self.site.refusal(request).or_else(|| match content {
            Content::None => None,
            Content::Body => Some(Answer::text(413, "a request must have no body")),
            Content::Malformed => Some(Answer::text(400, "the length of the request's body is no number")),
        });
        refusal.map_or_else(|| self.site.reply(request), Reply::Now)
    }

    /// Sends an answer, if the connection is still there.
    fn answer(&mut self, number: u64, answer: &Answer, now: Instant) {
        let connection = self.connections.iter_mut().find(|connection| connection.number() == number);
        let progress = connection.map(|connection| connection.answer(answer, self.site.headers(), now));
        if let Some(Progress::Over) = progress {
            self.close(number);
        }
    }

    fn close(&mut self, number: u64) {
        self.connections.retain(|connection| connection.number() != number);
    }

    /// Accepts connections that wait, and answers requests that have arrived with them.
    ///
    /// Beyond the maximum, a new connection takes the place of another one, so that idle ones keep nobody out.
    fn accept(&mut self, now: Instant) {
        if self.paused_until.is_some() {
            return;
        }
        for _ in 0..MAX_CONNECTIONS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match accept_with(&self.listener, flags) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                // No descriptors or no memory are left.
                Err(_) => {
                    self.paused_until = Some(now + ACCEPT_PAUSE);
                    return;
                }
            };
            // The kernel gives out the lowest free number.
            if socket.as_raw_fd() as u64 >= descriptors_for_connections() {
                continue;
            }
            if self.connections.len() >= MAX_CONNECTIONS
                && let Some((_, number)) = self.connections.iter().map(Connection::rank).min()
            {
                self.close(number);
            }
            self.accepted += 1;
            self.connections.push(Connection::new(socket, self.accepted, now));
            self.advance(self.accepted, now);
        }
    }
}

/// The numbers of descriptors that connections may have: those below.
fn descriptors_for_connections() -> u64 {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    limit - RESERVED_DESCRIPTORS.min(limit / 2)
}

/// The thread that computes answers, one after the other.
struct Work {
    name: String,
    /// `None` before the first task.
    tasks: Option<Sender<Box<dyn FnOnce() + Send>>>,
    /// The number of tasks that are not done.
    pending: Arc<AtomicUsize>,
    answers: Sender<Computed>,
}

impl Work {
    /// Begins a task for a connection, or returns that there are too many.
    fn begin(&mut self, number: u64, task: Box<dyn FnOnce() -> Answer + Send>, wake: &EventFd) -> bool {
        let Ok(wake) = wake.try_clone() else { return false };
        if self.pending.load(Ordering::Acquire) >= MAX_WORK {
            return false;
        }
        if self.tasks.is_none() {
            let (tasks, to_do) = unbounded::<Box<dyn FnOnce() + Send>>();
            // It ends with the sender, and nobody waits for it: a task may take long.
            let thread = Builder::new().name(self.name.clone()).spawn(move || to_do.iter().for_each(|task| task()));
            self.tasks = thread.is_ok().then_some(tasks);
        }
        let Some(tasks) = &self.tasks else { return false };
        self.pending.fetch_add(1, Ordering::AcqRel);
        let (answers, pending) = (self.answers.clone(), Arc::clone(&self.pending));
        let compute = move || {
            let answer = task();
            pending.fetch_sub(1, Ordering::AcqRel);
            // The server may have ended.
            let _ = answers.send((number, answer));
            wake.raise();
        };
        let is_begun = tasks.send(Box::new(compute)).is_ok();
        if !is_begun {
            self.pending.fetch_sub(1, Ordering::AcqRel);
        }
        is_begun
    }
}
