//! Asks the launchers of running recordings, all at once and within one time limit.
//!
//! Every user can listen under the name of a session, since `/proc/net/unix` lists them. So nothing here waits for one
//! peer: connecting does not block, the kernel says who listens before anything is sent or read, and the limit is that
//! of the whole exchange, not of one read.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use memtrace_trace::shm::handshake::peer_credentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;

use crate::control::{Answer, Request};

/// How long a launcher may take to write out.
const WRITE_OUT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a launcher may take to say which processes it records.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to try to connect where others fill the queue of a socket, and how long root waits for another user's
/// launcher.
const SHORT_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(10);
/// The maximum number of answers that are awaited at once.
const MAX_AWAITED: usize = 64;
/// The maximum length of an answer, in bytes.
const MAX_ANSWER: usize = 1 << 20;

/// The result of asking one launcher.
#[derive(Debug)]
pub(crate) enum Reply {
    /// Its answer.
    Answer(Answer),
    /// There is no launcher, or it ended before it answered.
    Ended,
    /// Another user listens under the name.
    OtherUser,
    /// No answer within this time. The process id of the launcher, if it is known.
    Silent(Option<i32>, Duration),
    /// The answer cannot be read.
    Unreadable(String),
}

/// Asks the launcher of one session.
pub(crate) fn ask(session: &str, request: Request) -> Reply {
    ask_all(&[session.to_owned()], request).pop().unwrap_or(Reply::Ended)
}

/// Asks the launchers of all these sessions. The replies are in their order.
pub(crate) fn ask_all(sessions: &[String], request: Request) -> Vec<Reply> {
    let began = Instant::now();
    let mut states: Vec<State> = sessions.iter().map(|_| State::Unconnected).collect();
    while states.iter().any(|state| !matches!(state, State::Done(_))) {
        let mut awaited = states.iter().filter(|state| matches!(state, State::Awaited(_))).count();
        for (state, session) in states.iter_mut().zip(sessions) {
            if matches!(state, State::Unconnected) && awaited < MAX_AWAITED {
                *state = begin(session, request, began);
                awaited += usize::from(matches!(state, State::Awaited(_)));
            }
        }
        wait(&states);
        for state in &mut states {
            if let State::Awaited(exchange) = state
                && let Some(reply) = exchange.go_on()
            {
                *state = State::Done(reply);
            }
        }
    }
    let reply = |state| if let State::Done(reply) = state { reply } else { Reply::Ended };
    states.into_iter().map(reply).collect()
}

/// The state of the exchange with one launcher.
#[derive(Debug)]
enum State {
    /// The queue of the socket was full, or too many answers are awaited.
    Unconnected,
    Awaited(Exchange),
    Done(Reply),
}

/// A request that was sent.
#[derive(Debug)]
struct Exchange {
    socket: UnixStream,
    pid: i32,
    began: Instant,
    timeout: Duration,
    text: Vec<u8>,
}

/// Tries to connect, and sends the request. `first` is when the attempts began.
fn begin(session: &str, request: Request, first: Instant) -> State {
    let socket = match connect_to(session) {
        Ok(socket) => UnixStream::from(socket),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
            let is_late = first.elapsed() >= SHORT_TIMEOUT;
            return if is_late { State::Done(Reply::Silent(None, SHORT_TIMEOUT)) } else { State::Unconnected };
        }
        Err(_) => return State::Done(Reply::Ended),
    };
    let us = geteuid().as_raw();
    let Ok(peer) = peer_credentials(socket.as_fd()) else { return State::Done(Reply::Ended) };
    let is_trusted = peer.uid == us || peer.uid == 0;
    // Root reads the recordings of every user, each under that user's name.
    let is_named = us == 0 && session.split_once('-').is_some_and(|(uid, _)| uid.parse() == Ok(peer.uid));
    if !is_trusted && !is_named {
        return State::Done(Reply::OtherUser);
    }
    let timeout = match request {
        _ if !is_trusted => SHORT_TIMEOUT,
        Request::Describe => DESCRIBE_TIMEOUT,
        Request::WriteOut => WRITE_OUT_TIMEOUT,
    };
    let bytes = request.to_bytes();
    match (&socket).write(&bytes) {
        Ok(written) if written == bytes.len() => {}
        _ => return State::Done(Reply::Ended),
    }
    State::Awaited(Exchange { socket, pid: peer.pid, began: Instant::now(), timeout, text: Vec::new() })
}

/// Connects without waiting.
fn connect_to(session: &str) -> rustix::io::Result<OwnedFd> {
    let address = SocketAddrUnix::new_abstract_name(format!("memtrace-{session}").as_bytes())?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &address)?;
    Ok(socket)
}

/// Waits until a launcher answers, but not longer than until the next one is due.
fn wait(states: &[State]) {
    let awaited: Vec<&Exchange> =
        states.iter().filter_map(|state| if let State::Awaited(one) = state { Some(one) } else { None }).collect();
    let is_unconnected = states.iter().any(|state| matches!(state, State::Unconnected));
    let due = awaited.iter().map(|one| one.timeout.saturating_sub(one.began.elapsed()));
    let Some(limit) = due.chain(is_unconnected.then_some(PAUSE)).min() else { return };
    let mut descriptors: Vec<PollFd<'_>> = awaited.iter().map(|one| PollFd::new(&one.socket, PollFlags::IN)).collect();
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    // An interrupted wait only leads to one more turn.
    _ = poll(&mut descriptors, Some(&limit));
}

impl Exchange {
    /// Reads what has arrived. `None` if the launcher still has time to answer.
    fn go_on(&mut self) -> Option<Reply> {
        let mut part = [0; 1 << 14];
        loop {
            if self.began.elapsed() >= self.timeout {
                return Some(Reply::Silent(Some(self.pid), self.timeout));
            }
            match self.socket.read(&mut part) {
                Ok(0) if self.text.is_empty() => return Some(Reply::Ended),
                Ok(0) => {
                    let parsed = serde_json::from_slice(&self.text);
                    return Some(parsed.map_or_else(|error| Reply::Unreadable(error.to_string()), Reply::Answer));
                }
                Ok(read) => self.text.extend_from_slice(part.get(..read)?),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Some(Reply::Ended),
            }
            if self.text.len() > MAX_ANSWER {
                return Some(Reply::Unreadable(format!("it has more than {MAX_ANSWER} bytes")));
            }
        }
    }
}
