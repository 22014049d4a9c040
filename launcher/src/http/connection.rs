//! One connection: a request, its answer, and the end.
//!
//! Nothing here blocks. Each step has a deadline, which a client cannot move by sending or reading a little.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, sendmsg, shutdown};

use super::answer::{Answer, Body};
use super::request::{Content, Head, MAX_HEAD, Request};

/// How long a client may take for the head of its request. Tests have idle clients that stay.
const HEAD_TIME: Duration = Duration::from_secs(if cfg!(test) { 3600 } else { 5 });
/// How long a client may read nothing of an answer, and how long the whole answer may take.
const STALL_TIME: Duration = Duration::from_secs(10);
const ANSWER_TIME: Duration = Duration::from_secs(300);
/// How long the server waits for the client to close the connection after an answer, and how many bytes it may still
/// send. A connection that is closed with unread bytes is reset, and the client might not see the answer.
const CLOSE_TIME: Duration = Duration::from_millis(500);
const MAX_IGNORED: usize = 64 << 10;

/// A connection to a client.
#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    /// Connections count from the start of the server.
    number: u64,
    state: State,
    deadline: Instant,
}

#[derive(Debug)]
enum State {
    /// The head of the request is incomplete.
    Reading(Vec<u8>),
    /// The answer is being computed. `is_head_only` for a HEAD request.
    Waiting { is_head_only: bool },
    /// The answer is being sent.
    Writing { head: Vec<u8>, body: Body, sent: usize, until: Instant },
    /// The answer is sent, and the client is to close the connection.
    Ending { ignored: usize },
}

/// The outcome of reading or writing.
#[derive(Debug)]
pub(super) enum Progress {
    /// The connection goes on when its socket is ready.
    Pending,
    /// A request, which waits for its answer.
    Request(Request, Content),
    /// The client has sent something else: the status of the answer.
    Refused(u16),
    /// The connection is over.
    Over,
}

impl Connection {
    /// A connection of a client, whose socket does not block.
    pub(super) fn new(socket: OwnedFd, number: u64, now: Instant) -> Connection {
        Connection { socket, number, state: State::Reading(Vec::new()), deadline: now + HEAD_TIME }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// When the connection is over if nothing happens. `None` while its answer is being computed.
    pub(super) fn deadline(&self) -> Option<Instant> {
        (!matches!(self.state, State::Waiting { .. })).then_some(self.deadline)
    }

    /// The socket's readiness that matters.
    pub(super) fn interest(&self) -> PollFlags {
        match self.state {
            State::Reading(_) | State::Ending { .. } => PollFlags::IN,
            State::Writing { .. } => PollFlags::OUT,
            // The end of the connection is reported nevertheless.
            State::Waiting { .. } => PollFlags::empty(),
        }
    }

    /// How much a new connection needs the place of this one less: the least is closed first, then the oldest.
    pub(super) fn rank(&self) -> (u8, u64) {
        let progress = match self.state {
            State::Ending { .. } => 0,
            State::Reading(_) => 1,
            State::Writing { .. } => 2,
            State::Waiting { .. } => 3,
        };
        (progress, self.number)
    }

    /// Reads or writes what is possible now.
    pub(super) fn advance(&mut self, now: Instant) -> Progress {
        match &mut self.state {
            State::Reading(_) => self.read(),
            // Its socket is reported only if the client is gone.
            State::Waiting { .. } => Progress::Over,
            State::Writing { .. } => self.write(now),
            State::Ending { .. } => self.ignore(),
        }
    }

    fn read(&mut self) -> Progress {
        let State::Reading(bytes) = &mut self.state else { return Progress::Pending };
        loop {
            let mut chunk = [0; 4096];
            let room = MAX_HEAD.saturating_sub(bytes.len()).min(chunk.len());
            let Some(chunk) = chunk.get_mut(..room) else { return Progress::Over };
            match recv(&self.socket, &mut *chunk, RecvFlags::empty()) {
                // The client has sent a part of a request.
                Ok((_, 0)) => return Progress::Over,
                Ok((_, count)) => bytes.extend(chunk.iter().take(count)),
                Err(Errno::AGAIN | Errno::INTR) => return Progress::Pending,
                Err(_) => return Progress::Over,
            }
            let (progress, is_head_only) = match Head::read(bytes) {
                Head::Incomplete => continue,
                Head::Complete(request, content) => {
                    let is_head_only = request.method == "HEAD";
                    (Progress::Request(request, content), is_head_only)
                }
                Head::Malformed => (Progress::Refused(400), false),
                Head::TooLarge => (Progress::Refused(431), false),
            };
            self.state = State::Waiting { is_head_only };
            return progress;
        }
    }

    /// Sends an answer, with these headers of the site: what is possible now.
    pub(super) fn answer(&mut self, answer: &Answer, headers: &[(&'static str, String)], now: Instant) -> Progress {
        let State::Waiting { is_head_only } = self.state else { return Progress::Pending };
        let head = answer.head(headers).into_bytes();
        let body = if is_head_only { Body::default() } else { answer.body.clone() };
        self.state = State::Writing { head, body, sent: 0, until: now + ANSWER_TIME };
        self.deadline = now + STALL_TIME;
        self.write(now)
    }

    fn write(&mut self, now: Instant) -> Progress {
        let State::Writing { head, body, sent, until } = &mut self.state else { return Progress::Pending };
        loop {
            let rest_of_head = head.get(*sent..).unwrap_or_default();
            let rest_of_body = body.get(sent.saturating_sub(head.len())..).unwrap_or_default();
            if rest_of_head.is_empty() && rest_of_body.is_empty() {
                return self.close(now);
            }
            let parts = [IoSlice::new(rest_of_head), IoSlice::new(rest_of_body)];
            match sendmsg(&self.socket, &parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL) {
                Ok(count) => {
                    *sent += count;
                    self.deadline = (now + STALL_TIME).min(*until);
                }
                Err(Errno::AGAIN | Errno::INTR) => return Progress::Pending,
                Err(_) => return Progress::Over,
            }
        }
    }

    /// Lets the client close the connection.
    fn close(&mut self, now: Instant) -> Progress {
        if shutdown(&self.socket, Shutdown::Write).is_err() {
            return Progress::Over;
        }
        (self.state, self.deadline) = (State::Ending { ignored: 0 }, now + CLOSE_TIME);
        self.ignore()
    }

    fn ignore(&mut self) -> Progress {
        let State::Ending { ignored } = &mut self.state else { return Progress::Pending };
        let mut bytes = [0; 4096];
        while *ignored < MAX_IGNORED {
            match recv(&self.socket, &mut bytes, RecvFlags::empty()) {
                Ok((_, 0)) => return Progress::Over,
                Ok((_, count)) => *ignored += count,
                Err(Errno::AGAIN | Errno::INTR) => return Progress::Pending,
                Err(_) => return Progress::Over,
            }
        }
        Progress::Over
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
