//! The door: who may ask for a segment, and how many may stand before it.
//!
//! The socket's name is no secret: `/proc/net/unix` shows it to everybody. So the kernel is asked who knocks. Only processes of our own
//! user (and root's, who may do anything) are heard; the others are turned away at once and take no place from anybody. Among our own
//! nobody can keep others out by standing there and saying nothing: the oldest silent caller makes room.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use memtrace_trace::shm::handshake::{Hello, peer_credentials};

use crate::epoll::Epoll;

/// A caller must say hello within this time.
const HELLO_WITHIN: Duration = Duration::from_secs(2);
/// Callers that may be in the middle of their hello.
const MAX_CALLERS: usize = 256;
/// The same of one process. Ours has never more than one.
const MAX_CALLERS_OF_ONE: usize = 4;

/// Why somebody got no segment: counted, and told when the run ends.
pub(super) type Reason = &'static str;

const NO_DESCRIPTORS: Reason = "no descriptors left";

/// Whether a call failed for want of a descriptor.
fn no_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Why a call failed that needs a descriptor: for want of one, or for this reason of its own.
pub(super) fn why(error: &io::Error, otherwise: Reason) -> Reason {
    if no_descriptors(error) { NO_DESCRIPTORS } else { otherwise }
}

/// A process, named so that it cannot be taken for another.
#[derive(Debug)]
pub(super) struct Peer {
    /// Its number in our pid namespace.
    pub(super) pid: u32,
    /// Readable when it has died; `None` on kernels before 5.3.
    pub(super) pidfd: Option<OwnedFd>,
}

impl Peer {
    /// Who is at the other end, as the kernel knows it.
    fn of(socket: BorrowedFd<'_>) -> Result<Peer, Reason> {
        let peer = peer_credentials(socket).map_err(|_| "peer unknown")?;
        // SAFETY: a plain call.
        let ours = unsafe { libc::geteuid() };
        if peer.uid != ours && peer.uid != 0 {
            return Err("another user");
        }
        let pid = u32::try_from(peer.pid).ok().filter(|pid| *pid > 0).ok_or("outside our pid namespace")?;
        let pidfd = match peer_pidfd(socket) {
            // Before Linux 6.5: by its number, at once, before that can have become another's.
            Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => match pidfd_open(pid) {
                Err(e) if no_descriptors(&e) => return Err(NO_DESCRIPTORS),
                pidfd => pidfd.ok(),
            },
            Err(e) => return Err(why(&e, "gone before the answer")),
            Ok(pidfd) => Some(pidfd),
        };
        Ok(Peer { pid, pidfd })
    }

    /// Whether it has ended. Its number may belong to another process by now.
    pub(super) fn is_gone(&self) -> bool {
        self.pidfd.as_ref().is_some_and(|pidfd| {
            let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one valid entry, and no waiting.
            unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
        })
    }
}

/// The process that connected, whatever its number means by now (Linux 6.5).
fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut fd: RawFd = -1;
    let mut len = size_of::<RawFd>() as libc::socklen_t;
    // SAFETY: an open socket and a place of the length that is passed along; the descriptor is new and ours.
    unsafe {
        let option = libc::SO_PEERPIDFD;
        if libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, (&raw mut fd).cast(), &mut len) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: a plain call; the descriptor it returns is new, close-on-exec, and ours.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd as RawFd)) }
    }
}

/// Somebody who has connected and not yet said hello.
#[derive(Debug)]
struct Caller {
    socket: UnixStream,
    peer: Peer,
    deadline: Instant,
    hello: [u8; size_of::<Hello>()],
    read: usize,
}

/// Somebody who has said the right hello.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) socket: UnixStream,
    pub(super) peer: Peer,
}

/// The socket and those before it.
#[derive(Debug)]
pub(super) struct Door {
    listener: UnixListener,
    /// By token, which is in the order of their coming.
    callers: BTreeMap<u64, Caller>,
    /// A descriptor to give up when there are no others, so that callers can be turned away.
    spare: Option<File>,
}

impl Door {
    /// A door in this listener's place, which must not block.
    pub(super) fn new(listener: UnixListener) -> Door {
        Door { listener, callers: BTreeMap::new(), spare: spare() }
    }

    /// Whether somebody is in the middle of their hello.
    pub(super) fn is_quiet(&self) -> bool {
        self.callers.is_empty()
    }

    /// Whether this token is a caller's.
    pub(super) fn knows(&self, token: u64) -> bool {
        self.callers.contains_key(&token)
    }

    /// Lets the next one in line come before the door, under this token. `None` when there is nobody.
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

    /// Sends the oldest caller away where there are too many; whether there were.
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

    /// Hears what a caller says; `None` while it is not all.
    pub(super) fn hear(&mut self, token: u64) -> Option<Result<Guest, Reason>> {
        let caller = self.callers.get_mut(&token)?;
        // Descriptors that come along are not asked for: the kernel drops them.
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

    /// Sends away whoever has had time enough; how many those were.
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
