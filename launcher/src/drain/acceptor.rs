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
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags};

use super::refusal::RefusalReason;
use crate::control::Request;
use crate::epoll::Epoll;

/// A peer must send its complete hello message within this time.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum number of connections whose hello is incomplete.
const MAX_PENDING: usize = 256;
/// The maximum number of such connections from one process. The memtrace library never opens more than one.
const MAX_PENDING_OF_ONE: usize = 4;

/// Whether a call failed because no file descriptor was available.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// The reason for a failed call that creates a descriptor: [`RefusalReason::NoDescriptors`] when none was available,
/// else `otherwise`.
pub(super) fn refusal_reason(error: &io::Error, otherwise: RefusalReason) -> RefusalReason {
    if is_out_of_descriptors(error) { RefusalReason::NoDescriptors } else { otherwise }
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
    fn of(socket: BorrowedFd<'_>) -> Result<Peer, RefusalReason> {
        let peer = peer_credentials(socket).map_err(|_| RefusalReason::UnknownPeer)?;
        if peer.uid != rustix::process::geteuid().as_raw() && peer.uid != 0 {
            return Err(RefusalReason::OtherUser);
        }
        let pid = u32::try_from(peer.pid).ok().filter(|pid| *pid > 0).ok_or(RefusalReason::OtherPidNamespace)?;
        let pidfd = match peer_pidfd(socket) {
            // Kernels before 6.5 have no `SO_PEERPIDFD`. Open the pidfd by pid at once, before the pid can be reused.
            Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => match pidfd_open(pid) {
                Err(e) if is_out_of_descriptors(&e) => return Err(RefusalReason::NoDescriptors),
                pidfd => pidfd.ok(),
            },
            Err(e) => return Err(refusal_reason(&e, RefusalReason::ProcessEnded)),
            Ok(pidfd) => Some(pidfd),
        };
        Ok(Peer { pid, pidfd })
    }

    /// Whether the process has ended. Its pid may then belong to another process. Always false without a pidfd.
    pub(super) fn has_exited(&self) -> bool {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let has_ended = |pidfd| poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&at_once)) == Ok(1);
        self.pidfd.as_ref().is_some_and(has_ended)
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
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// A connection whose hello message is not complete yet.
#[derive(Debug)]
struct PendingConnection {
    socket: UnixStream,
    peer: Peer,
    deadline: Instant,
    hello: [u8; size_of::<Hello>()],
    read: usize,
}

/// The request of a connection.
#[derive(Debug)]
pub(super) enum Asked {
    /// A traced process sent a valid hello message: it wants to be recorded.
    Record(Client),
    /// Another memtrace command asks about the recording.
    Inquire(UnixStream, Request),
}

/// A connection that sent a valid hello message.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) socket: UnixStream,
    pub(super) peer: Peer,
}

/// The listening socket and the connections whose hello is incomplete.
#[derive(Debug)]
pub(super) struct Acceptor {
    listener: UnixListener,
    /// The connections by token. Tokens ascend in the order of arrival.
    pending: BTreeMap<u64, PendingConnection>,
    /// A spare descriptor, closed when no others are left, so that connections can still be accepted and refused.
    spare: Option<File>,
}

impl Acceptor {
    /// Creates an acceptor for this listener, which must be non-blocking.
    pub(super) fn new(listener: UnixListener) -> Acceptor {
        Acceptor { listener, pending: BTreeMap::new(), spare: open_spare() }
    }

    /// Whether no connection is in the middle of its hello.
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// Whether this token belongs to a connection whose hello is incomplete.
    pub(super) fn has_pending(&self, token: u64) -> bool {
        self.pending.contains_key(&token)
    }

    /// Accepts the next waiting connection and registers it with `epoll` under `token`.
    ///
    /// `None` when no connection waits. An error is the reason for a refusal, of this connection or of an older silent
    /// one.
    pub(super) fn accept(&mut self, token: u64, epoll: &Epoll) -> Option<Result<(), RefusalReason>> {
        let socket = match self.listener.accept() {
            Ok((socket, _)) => socket,
            Err(e) if is_out_of_descriptors(&e) && self.spare.take().is_some() => {
                let refused = self.listener.accept().is_ok();
                self.spare = open_spare();
                return refused.then_some(Err(RefusalReason::NoDescriptors));
            }
            Err(_) => return None,
        };
        let peer = match Peer::of(socket.as_fd()) {
            Ok(peer) => peer,
            Err(reason) => return Some(Err(reason)),
        };
        if socket.set_nonblocking(true).and_then(|()| epoll.add(socket.as_fd(), token)).is_err() {
            return Some(Err(RefusalReason::NoDescriptors));
        }
        let silent = self.close_oldest_if_full(peer.pid);
        let deadline = Instant::now() + HELLO_TIMEOUT;
        self.pending
            .insert(token, PendingConnection { socket, peer, deadline, hello: [0; size_of::<Hello>()], read: 0 });
        Some(if silent { Err(RefusalReason::IncompleteRequest) } else { Ok(()) })
    }

    /// Closes the oldest connection when there are too many. Returns whether it closed one.
    fn close_oldest_if_full(&mut self, pid: u32) -> bool {
        let mut same =
            self.pending.iter().filter(|(_, connection)| connection.peer.pid == pid).map(|(token, _)| *token);
        let oldest = same.next();
        let oldest = if 1 + same.count() >= MAX_PENDING_OF_ONE {
            oldest
        } else if self.pending.len() >= MAX_PENDING {
            self.pending.keys().next().copied()
        } else {
            None
        };
        oldest.and_then(|token| self.pending.remove(&token)).is_some()
    }

    /// Reads the first message of a connection. `None` while the message is incomplete or when the token is unknown.
    pub(super) fn read_hello(&mut self, token: u64) -> Option<Result<Asked, RefusalReason>> {
        let connection = self.pending.get_mut(&token)?;
        // A plain read asks for no ancillary data, so the kernel drops any descriptors that were sent along.
        match connection.socket.read(connection.hello.get_mut(connection.read..)?) {
            Ok(n) if n > 0 => {
                connection.read += n;
                if connection.read < connection.hello.len() {
                    return None;
                }
                let PendingConnection { socket, peer, hello, .. } = self.pending.remove(&token)?;
                Some(match (Hello::from_bytes(&hello), Request::from_bytes(&hello)) {
                    (Some(_), _) => Ok(Asked::Record(Client { socket, peer })),
                    (None, Some(request)) => Ok(Asked::Inquire(socket, request)),
                    (None, None) => Err(RefusalReason::OtherBuild),
                })
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock || e.kind() == io::ErrorKind::Interrupted => None,
            _ => {
                self.pending.remove(&token);
                Some(Err(RefusalReason::IncompleteRequest))
            }
        }
    }

    /// Closes the connections whose deadline has passed, and returns their number.
    pub(super) fn close_expired(&mut self) -> usize {
        if self.pending.is_empty() {
            return 0;
        }
        let (now, before) = (Instant::now(), self.pending.len());
        self.pending.retain(|_, connection| connection.deadline > now);
        before - self.pending.len()
    }
}

fn open_spare() -> Option<File> {
    File::open("/dev/null").ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_peer_of_a_socket_pair_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = Peer::of(a.as_fd()).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert!(peer.pidfd.is_some() && !peer.has_exited());
        assert!(pidfd_open(std::process::id()).is_ok());
    }

    #[test]
    fn silent_connections_block_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (mut acceptor, epoll) = (Acceptor::new(listener), Epoll::new().unwrap());
        assert!(acceptor.accept(1, &epoll).is_none());
        let mut silent = Vec::new();
        for token in 1..=MAX_PENDING_OF_ONE as u64 {
            silent.push(UnixStream::connect(&path).unwrap());
            assert_eq!(acceptor.accept(token, &epoll), Some(Ok(())));
            assert!(acceptor.read_hello(token).is_none());
        }
        let mut valid = UnixStream::connect(&path).unwrap();
        assert_eq!(
            acceptor.accept(99, &epoll),
            Some(Err(RefusalReason::IncompleteRequest)),
            "the oldest connection was closed"
        );
        assert!(!acceptor.has_pending(1) && acceptor.has_pending(2) && acceptor.has_pending(99));
        let hello = Hello::new(0).to_bytes();
        valid.write_all(&hello[..3]).unwrap();
        assert!(acceptor.read_hello(99).is_none());
        valid.write_all(&hello[3..]).unwrap();
        let Some(Ok(Asked::Record(client))) = acceptor.read_hello(99) else { panic!("no hello") };
        assert_eq!(client.peer.pid, std::process::id());
        silent[1].write_all(&[7; size_of::<Hello>()]).unwrap();
        assert_eq!(acceptor.read_hello(2).unwrap().unwrap_err(), RefusalReason::OtherBuild);
        drop(silent);
        assert_eq!(acceptor.read_hello(3).unwrap().unwrap_err(), RefusalReason::IncompleteRequest);
        assert!(acceptor.read_hello(3).is_none() && !acceptor.is_idle());
        assert_eq!(acceptor.close_expired(), 0, "no deadline has passed");
    }
}
