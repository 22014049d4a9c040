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

/// The content of a server.
pub(crate) trait Site: Send + 'static {
    /// The headers of every answer, beside those that each answer has.
    fn headers(&self) -> &[(&'static str, String)];

    /// The refusal of a request whose sender may get nothing. Nothing else of it is read then.
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};

    use crossbeam_channel::bounded;

    use super::super::answer::Body;
    use super::*;

    /// Answers `/` with a body, and others when the test lets it.
    struct Pages {
        body: Body,
        begun: Sender<()>,
        go_on: Receiver<()>,
    }

    impl Site for Pages {
        fn headers(&self) -> &[(&'static str, String)] {
            &[]
        }

        fn refusal(&self, request: &Request) -> Option<Answer> {
            request.hosts.is_empty().then(|| Answer::text(403, "no host"))
        }

        fn reply(&mut self, request: &Request) -> Reply {
            if request.target == "/" {
                return Reply::Now(Answer::new("text/plain", Arc::clone(&self.body)));
            }
            let (begun, go_on) = (self.begun.clone(), self.go_on.clone());
            Reply::Later(Box::new(move || {
                // The test may have ended.
                let _ = begun.send(());
                let _ = go_on.recv();
                Answer::text(200, "computed")
            }))
        }
    }

    /// A server, its address, and the channels of its work.
    fn start(body: usize) -> (Server, SocketAddr, Receiver<()>, Sender<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ((begun, is_begun), (go_on, may_go_on)) = (unbounded(), bounded(0));
        let site = Pages { body: Body::new(vec![b'x'; body]), begun, go_on: may_go_on };
        (Server::start(Listener::of(listener).unwrap(), site, "test").unwrap(), address, is_begun, go_on)
    }

    fn send(address: SocketAddr, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    fn get(address: SocketAddr, path: &str) -> TcpStream {
        send(address, &format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"))
    }

    /// The bytes that the server sends until it closes the connection.
    fn answer(mut stream: TcpStream) -> String {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn who_may_get_nothing_is_refused_before_the_rest_is_read() {
        let (_server, address, ..) = start(9);
        let status = |headers: &str| answer(send(address, &format!("GET / HTTP/1.1\r\n{headers}\r\n")));
        assert!(status("Content-Length: 1\r\n").starts_with("HTTP/1.1 403 "));
        assert!(status("Host: a\r\nContent-Length: 1\r\n").starts_with("HTTP/1.1 413 "));
        assert!(status("Host: a\r\nContent-Length: x\r\n").starts_with("HTTP/1.1 400 "));
        let page = status("Host: a\r\n");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.ends_with("\r\nContent-Length: 9\r\n\r\nxxxxxxxxx"));
        let head = answer(send(address, "HEAD / HTTP/1.1\r\nHost: a\r\n\r\n"));
        assert!(head.ends_with("\r\nContent-Length: 9\r\n\r\n"), "{head}");
    }

    #[test]
    fn a_new_connection_takes_the_place_of_the_oldest_idle_one() {
        let (_server, address, ..) = start(9);
        let idle: Vec<TcpStream> = (0..MAX_CONNECTIONS).map(|_| send(address, "GET / HT")).collect();
        assert!(answer(get(address, "/")).starts_with("HTTP/1.1 200 "));
        let mut idle = idle.into_iter();
        // It is closed, whether the server had read from it or not.
        let closed = idle.next().unwrap().read(&mut [0; 9]).unwrap_or(0);
        assert_eq!(closed, 0);
        let mut second = idle.next().unwrap();
        second.write_all(b"TP/1.1\r\nHost: a\r\n\r\n").unwrap();
        assert!(answer(second).starts_with("HTTP/1.1 200 "), "only one place was needed");
    }

    #[test]
    fn the_work_is_bounded_and_delays_nobody() {
        let (server, address, begun, go_on) = start(9);
        let waiting = [(); MAX_WORK].map(|()| get(address, "/work"));
        begun.recv().unwrap();
        // The requests can arrive in any order.
        let mut more = Vec::new();
        let refused = std::iter::repeat_with(|| get(address, "/work")).find_map(|stream| {
            stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            let is_answered = stream.peek(&mut [0; 1]).is_ok();
            stream.set_read_timeout(None).unwrap();
            if is_answered {
                return Some(stream);
            }
            more.push(stream);
            None
        });
        assert!(answer(refused.unwrap()).starts_with("HTTP/1.1 503 "));
        assert!(answer(get(address, "/")).starts_with("HTTP/1.1 200 "));
        go_on.send(()).unwrap();
        begun.recv().unwrap();
        go_on.send(()).unwrap();
        let answers = waiting.into_iter().chain(more).map(answer).filter(|text| text.ends_with("computed\n"));
        assert_eq!(answers.count(), MAX_WORK);
        // The end does not wait for work.
        let _stream = get(address, "/work");
        begun.recv().unwrap();
        drop(server);
        assert!(TcpStream::connect(address).is_err());
    }

    #[test]
    fn the_end_does_not_wait_for_who_reads_nothing() {
        let (server, address, ..) = start(64 << 20);
        let mut deaf = get(address, "/");
        // The answer has begun.
        deaf.read_exact(&mut [0; 9]).unwrap();
        assert_eq!(answer(get(address, "/")).len() & !0xfff, 64 << 20, "others are served meanwhile");
        drop(server);
    }
}
