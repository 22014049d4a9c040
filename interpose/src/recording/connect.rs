//! Requests a shared-memory segment from the launcher at a process's first event.
//!
//! The program waits meanwhile, so the wait is bounded. A running launcher answers within a few milliseconds. On an
//! overloaded machine, or if the launcher is stopped, the wait ends after [`ANSWER_TIMEOUT`]. A hook waits as long for
//! space in a ring. After that no event waits again while the launcher is stopped. A connection to a launcher that has
//! ended fails at once.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use memtrace_trace::shm::handshake::{Hello, address, is_trusted, peer_credentials, recv_fd};
use memtrace_trace::shm::run_lock::RunLock;
use memtrace_trace::unrecorded::Reason;

use super::slot::Slot;

/// The longest time for the launcher's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The launcher's process id. 0 before it is known, and if its pid namespace is not visible here.
static LAUNCHER_PID: AtomicI32 = AtomicI32::new(0);

/// The lock of the run. A forked child inherits the mapping.
static RUN_LOCK: Slot<Option<RunLock>> = Slot::new();

/// The lock of the run. `None` if the launcher has none, or before the first recording.
pub(super) fn run_lock() -> Option<&'static RunLock> {
    RUN_LOCK.get()?.as_ref()
}

/// Why there is no segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NoSegment {
    /// The launcher refused the request, which it counts.
    Refused,
    /// The launcher does not know about the request.
    Unrecorded(Reason),
}

/// The reason of a failed system call. `otherwise` stands for the errors that no filter and no limit causes.
fn reason_of_error(error: &io::Error, otherwise: Reason) -> NoSegment {
    NoSegment::Unrecorded(match error.raw_os_error() {
        // A seccomp filter usually answers with one of these.
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => Reason::Seccomp,
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS) => Reason::NoResources,
        Some(libc::EAGAIN | libc::EINTR | libc::ETIMEDOUT | libc::EINPROGRESS) => Reason::NoAnswer,
        _ => otherwise,
    })
}

/// Requests a segment, which is returned as its file, and the run's lock. `is_retry` says that an earlier attempt has
/// failed.
pub(crate) fn request_segment(token: &str, generation: u32, is_retry: bool) -> Result<OwnedFd, NoSegment> {
    let last_error = |otherwise| reason_of_error(&io::Error::last_os_error(), otherwise);
    if is_retry && process_state(LAUNCHER_PID.load(Ordering::Relaxed)).is_some_and(is_stopped) {
        return Err(NoSegment::Unrecorded(Reason::NoAnswer));
    }
    let (address, len) = address(token).map_err(|_| NoSegment::Unrecorded(Reason::NoListener))?;
    // SAFETY: `OwnedFd` owns the new descriptor. The addresses and lengths passed describe live values.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(last_error(Reason::Seccomp));
        }
        let socket = OwnedFd::from_raw_fd(fd);
        // Connecting and sending block only if very many processes are waiting already.
        let limit = libc::timeval { tv_sec: ANSWER_TIMEOUT.as_secs() as libc::time_t, tv_usec: 0 };
        for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            let size = size_of::<libc::timeval>() as libc::socklen_t;
            libc::setsockopt(fd, libc::SOL_SOCKET, option, (&raw const limit).cast(), size);
        }
        if libc::connect(fd, (&raw const address).cast(), len) != 0 {
            return Err(last_error(Reason::NoListener));
        }
        socket
    };
    if !is_trusted(socket.as_fd()) {
        return Err(NoSegment::Unrecorded(Reason::NoListener));
    }
    let launcher = peer_credentials(socket.as_fd()).map_or(0, |peer| peer.pid);
    LAUNCHER_PID.store(launcher, Ordering::Relaxed);
    let hello = Hello::new(generation).to_bytes();
    // SAFETY: `hello` is valid for its length. `MSG_NOSIGNAL` prevents a SIGPIPE.
    let sent = unsafe { libc::send(socket.as_raw_fd(), hello.as_ptr().cast(), hello.len(), libc::MSG_NOSIGNAL) };
    if sent != hello.len() as isize {
        return Err(last_error(Reason::NoAnswer));
    }
    let began = Instant::now();
    loop {
        match recv_fd(socket.as_fd()) {
            Ok(fd) => {
                RUN_LOCK.set(recv_fd(socket.as_fd()).and_then(|fd| RunLock::map(fd.as_fd())).ok());
                return Ok(fd);
            }
            // A signal for the program has interrupted the call.
            Err(e) if e.kind() == io::ErrorKind::Interrupted && began.elapsed() < ANSWER_TIMEOUT => {}
            // The launcher closed the connection without an answer.
            Err(e) if matches!(e.kind(), io::ErrorKind::InvalidData | io::ErrorKind::ConnectionReset) => {
                return Err(NoSegment::Refused);
            }
            Err(e) => return Err(reason_of_error(&e, Reason::NoAnswer)),
        }
    }
}

/// Whether the launcher has ended. `false` if it is not visible.
pub(crate) fn has_launcher_ended() -> bool {
    let pid = LAUNCHER_PID.load(Ordering::Relaxed);
    // SAFETY: signal 0 is never delivered. The call only checks whether the process exists.
    let exists =
        || unsafe { libc::kill(pid, 0) } == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH);
    pid > 0 && (!exists() || matches!(process_state(pid), Some(b'Z' | b'X')))
}

/// Whether the process is stopped, by a signal or by a debugger.
fn is_stopped(state: u8) -> bool {
    matches!(state, b'T' | b't')
}

/// The letter of a process's state in /proc. `None` if the process does not exist or is not visible.
fn process_state(pid: libc::pid_t) -> Option<u8> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The process's name may contain any character. The letter follows the last parenthesis.
    let end = stat.iter().rposition(|b| *b == b')')?;
    stat.get(end.checked_add(2)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_process_is_recognized() {
        assert!(process_state(0).is_none() && !is_stopped(process_state(std::process::id() as i32).unwrap()));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let mut status = 0;
        // SAFETY: `pid` is a child of this process, and `status` is writable.
        unsafe {
            libc::kill(pid, libc::SIGSTOP);
            libc::waitpid(pid, &mut status, libc::WUNTRACED);
        }
        assert!(is_stopped(process_state(pid).unwrap()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(process_state(pid), None);
    }
}
