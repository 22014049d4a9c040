//! The acceptor: checks which processes may request a segment, and limits how many may wait.
//!
//! The socket's name is public, because `/proc/net/unix` shows it to every user. The kernel therefore supplies the
//! credentials of each peer. Only processes of the launcher's user and of root are served. Others are refused at once
//! and take no place. A silent process of the same user cannot block others: the oldest silent connection is closed to
//! make room.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use memtrace_trace::shm::handshake::{Hello, peer_credentials};

use crate::epoll::Epoll;

/// A peer must send its complete hello message within this time.
const HELLO_WITHIN: Duration = Duration::from_secs(2);
/// The maximum number of connections whose hello is incomplete.
const MAX_CALLERS: usize = 256;
/// The maximum number of such connections from one process. The memtrace library never opens more than one.
const MAX_CALLERS_OF_ONE: usize = 4;

/// Why a process got no segment. The reasons are counted and reported when the run ends.
pub(super) type Reason = &'static str;

const NO_DESCRIPTORS: Reason = "no descriptors left";

/// Whether a call failed because no file descriptor was available.
fn no_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// The reason for a failed call that creates a descriptor: [`NO_DESCRIPTORS`] when none was available, else
/// `otherwise`.
pub(super) fn why(error: &io::Error, otherwise: Reason) -> Reason {
    if no_descriptors(error) { NO_DESCRIPTORS } else { otherwise }
}

/// A process, identified so that it cannot be confused with a later one of the same pid.
#[derive(Debug)]
pub(super) struct Peer {
    /// The pid in the launcher's pid namespace.
    pub(super) pid: u32,
    /// Becomes readable when the process has ended. `None` on kernels before 5.3.
    pub(super) pidfd: Option<OwnedFd>,
}

impl Peer {
    /// The process at the other end of the socket, from the kernel's credentials.
    ///
    /// Fails for other users, for processes outside the launcher's pid namespace, and for processes that have ended.
    fn of(socket: BorrowedFd<'_>) -> Result<Peer, Reason> {
        let peer = peer_credentials(socket).map_err(|_| "peer unknown")?;
        // SAFETY: `geteuid` takes no arguments, accesses no memory of ours and cannot fail.
        let ours = unsafe { libc::geteuid() };
        if peer.uid != ours && peer.uid != 0 {
            return Err("another user");
        }
        let pid = u32::try_from(peer.pid).ok().filter(|pid| *pid > 0).ok_or("outside our pid namespace")?;
        let pidfd = match peer_pidfd(socket) {
            // Kernels before 6.5 have no `SO_PEERPIDFD`. Open the pidfd by pid at once, before the pid can be reused.
            Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => match pidfd_open(pid) {
                Err(e) if no_descriptors(&e) => return Err(NO_DESCRIPTORS),
                pidfd => pidfd.ok(),
            },
            Err(e) => return Err(why(&e, "gone before the answer")),
            Ok(pidfd) => Some(pidfd),
        };
        Ok(Peer { pid, pidfd })
    }

    /// Whether the process has ended. Its pid may then belong to another process. Always false without a pidfd.
    pub(super) fn is_gone(&self) -> bool {
        self.pidfd.as_ref().is_some_and(|pidfd| {
            let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: `poll` is one valid `pollfd` that lives on this stack frame, and the count is 1. `pidfd` keeps
            // the descriptor open during the call. The timeout of 0 makes the call return at once.
            unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
        })
    }
}

/// A pidfd of the process that connected, even if its pid was reused since. Needs Linux 6.5 (`SO_PEERPIDFD`).
fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut fd: RawFd = -1;
    let mut len = size_of::<RawFd>() as libc::socklen_t;
    // SAFETY: `socket` is borrowed and therefore open. `fd` and `len` are valid for writes, and `len` is the size of
    // `fd`. On success the kernel has stored a new descriptor in `fd` that nothing else owns.
    unsafe {
        let option = libc::SO_PEERPIDFD;
        if libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, (&raw mut fd).cast(), &mut len) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: `pidfd_open` takes two integers and accesses no memory of ours. The descriptor it returns is new and
    // close-on-exec, and nothing else owns it.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd as RawFd)) }
    }
}

/// A connection whose hello message is not complete yet.
#[derive(Debug)]
struct Caller {
    socket: UnixStream,
    peer: Peer,
    deadline: Instant,
    hello: [u8; size_of::<Hello>()],
    read: usize,
}

/// A connection that sent a valid hello message.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) socket: UnixStream,
    pub(super) peer: Peer,
}

/// The listening socket and the connections whose hello is incomplete.
#[derive(Debug)]
pub(super) struct Door {
    listener: UnixListener,
    /// The connections by token. Tokens ascend in the order of arrival.
    callers: BTreeMap<u64, Caller>,
    /// A spare descriptor, closed when no others are left, so that connections can still be accepted and refused.
    spare: Option<File>,
}

impl Door {
    /// Creates an acceptor for this listener, which must be non-blocking.
    pub(super) fn new(listener: UnixListener) -> Door {
        Door { listener, callers: BTreeMap::new(), spare: spare() }
    }

    /// Whether no connection is in the middle of its hello.
    pub(super) fn is_quiet(&self) -> bool {
        self.callers.is_empty()
    }

    /// Whether this token belongs to a connection whose hello is incomplete.
    pub(super) fn knows(&self, token: u64) -> bool {
        self.callers.contains_key(&token)
    }

    /// Accepts the next waiting connection and registers it with `epoll` under `token`.
    ///
    /// `None` when no connection waits. An error is the reason for a refusal, of this connection or of an older silent
    /// one.
    pub(super) fn admit(&mut self, token: u64, epoll: &Epoll) -> Option<Result<(), Reason>> {
        let socket = match self.listener.accept() {
            Ok((socket, _)) => socket,
            Err(e) if no_descriptors(&e) && self.spare.take().is_some() => {
                let refused = self.listener.accept().is_ok();
                self.spare = spare();
                return refused.then_some(Err(NO_DESCRIPTORS));
            }
            Err(_) => return None,
        };
        let peer = match Peer::of(socket.as_fd()) {
            Ok(peer) => peer,
            Err(reason) => return Some(Err(reason)),
        };
        if socket.set_nonblocking(true).and_then(|()| epoll.add(socket.as_fd(), token)).is_err() {
            return Some(Err(NO_DESCRIPTORS));
        }
        let silent = self.make_room(peer.pid);
        let deadline = Instant::now() + HELLO_WITHIN;
        self.callers.insert(token, Caller { socket, peer, deadline, hello: [0; size_of::<Hello>()], read: 0 });
        Some(if silent { Err("no hello") } else { Ok(()) })
    }

    /// Closes the oldest connection when there are too many. Returns whether it closed one.
    fn make_room(&mut self, pid: u32) -> bool {
        let mut same = self.callers.iter().filter(|(_, caller)| caller.peer.pid == pid).map(|(token, _)| *token);
        let oldest = same.next();
        let oldest = if 1 + same.count() >= MAX_CALLERS_OF_ONE {
            oldest
        } else if self.callers.len() >= MAX_CALLERS {
            self.callers.keys().next().copied()
        } else {
            None
        };
        oldest.and_then(|token| self.callers.remove(&token)).is_some()
    }

    /// Reads the hello message of a connection. `None` while the message is incomplete or when the token is unknown.
    pub(super) fn hear(&mut self, token: u64) -> Option<Result<Guest, Reason>> {
        let caller = self.callers.get_mut(&token)?;
        // A plain read asks for no ancillary data, so the kernel drops any descriptors that were sent along.
        match caller.socket.read(caller.hello.get_mut(caller.read..)?) {
            Ok(n) if n > 0 => {
                caller.read += n;
                if caller.read < caller.hello.len() {
                    return None;
                }
                let Caller { socket, peer, hello, .. } = self.callers.remove(&token)?;
                Some(match Hello::from_bytes(&hello) {
                    Some(_) => Ok(Guest { socket, peer }),
                    None => Err("library of another build"),
                })
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock || e.kind() == io::ErrorKind::Interrupted => None,
            _ => {
                self.callers.remove(&token);
                Some(Err("no hello"))
            }
        }
    }

    /// Closes the connections whose deadline has passed, and returns their number.
    pub(super) fn expire(&mut self) -> usize {
        if self.callers.is_empty() {
            return 0;
        }
        let (now, before) = (Instant::now(), self.callers.len());
        self.callers.retain(|_, caller| caller.deadline > now);
        before - self.callers.len()
    }
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_peer_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = Peer::of(a.as_fd()).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert!(peer.pidfd.is_some() && !peer.is_gone());
        assert!(pidfd_open(std::process::id()).is_ok());
    }

    #[test]
    fn a_silent_crowd_keeps_nobody_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("door");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (mut door, epoll) = (Door::new(listener), Epoll::new().unwrap());
        assert!(door.admit(1, &epoll).is_none());
        let mut crowd = Vec::new();
        for token in 1..=MAX_CALLERS_OF_ONE as u64 {
            crowd.push(UnixStream::connect(&path).unwrap());
            assert_eq!(door.admit(token, &epoll), Some(Ok(())));
            assert!(door.hear(token).is_none());
        }
        let mut honest = UnixStream::connect(&path).unwrap();
        assert_eq!(door.admit(99, &epoll), Some(Err("no hello")), "the oldest made room");
        assert!(!door.knows(1) && door.knows(2) && door.knows(99));
        let hello = Hello::new(0).to_bytes();
        honest.write_all(&hello[..3]).unwrap();
        assert!(door.hear(99).is_none());
        honest.write_all(&hello[3..]).unwrap();
        assert_eq!(door.hear(99).unwrap().unwrap().peer.pid, std::process::id());
        crowd[1].write_all(&[7; size_of::<Hello>()]).unwrap();
        assert_eq!(door.hear(2).unwrap().unwrap_err(), "library of another build");
        drop(crowd);
        assert_eq!(door.hear(3).unwrap().unwrap_err(), "no hello");
        assert!(door.hear(3).is_none() && !door.is_quiet());
        assert_eq!(door.expire(), 0, "not yet");
    }
}
