//! The signal probe: a small process in the launcher's process group. It shows whether a signal was sent to the group
//! or to the launcher alone.
//!
//! `kill PID` and `kill -- -PGID` look the same to the receiver. After the first, the command has no signal yet and the
//! launcher must pass it on. After the second, the command already has it. A duplicate would be harmful, because a
//! second Ctrl-C aborts the cleanup of many programs. The probe blocks all signals and reports each one over a pipe. To
//! query it, the launcher sends it a real-time signal. The kernel delivers pending ordinary signals first. When the
//! probe echoes the real-time signal, it has reported everything before it.
//!
//! The probe shares the launcher's group, so it must not outlive the launcher. The kernel kills it when the launcher
//! ends.

use std::cell::Cell;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// How long a group signal may take to reach the probe after the launcher. The kernel signals the whole group in one
/// pass.
const DELIVERY_DELAY: Duration = Duration::from_millis(2);
/// How long the probe may take to answer. Another process may have stopped it.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(200);

/// A handle to the probe process.
#[derive(Debug)]
pub(crate) struct SignalProbe {
    pid: libc::pid_t,
    reports: std::fs::File,
    /// Bit `n` is set when signal `n` was reported and not queried since.
    received: Cell<u64>,
}

fn ping() -> libc::c_int {
    libc::SIGRTMAX()
}

impl SignalProbe {
    /// Starts the probe. Must be called while this process has one thread.
    ///
    /// Fails when the pipe or the process cannot be created.
    pub(crate) fn start() -> io::Result<SignalProbe> {
        let mut ends: [RawFd; 2] = [-1; 2];
        // SAFETY: `ends` has space for the two descriptors that `pipe2` writes. They are new, and nothing else owns
        // them.
        let (reader, writer) = unsafe {
            if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
                return Err(io::Error::last_os_error());
            }
            (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
        };
        // SAFETY: the calls take no pointers. The process has one thread, which the caller of `start` guarantees. No
        // lock can therefore be held in the child of `fork`, and it may call any function.
        unsafe {
            let parent = libc::getpid();
            match libc::fork() {
                -1 => Err(io::Error::last_os_error()),
                0 => report_signals(writer.as_raw_fd(), parent),
                pid => Ok(SignalProbe { pid, reports: reader.into(), received: Cell::new(0) }),
            }
        }
    }

    /// Whether the probe also received this signal since the last query for it.
    ///
    /// False when the probe does not answer.
    pub(crate) fn has_received(&self, signal: libc::c_int) -> bool {
        std::thread::sleep(DELIVERY_DELAY);
        // SAFETY: `kill` takes two integers. The probe is a child that is not collected before drop, so its pid was not
        // reused.
        if unsafe { libc::kill(self.pid, ping()) } != 0 {
            return false;
        }
        let mut byte = [0u8];
        while self.has_report_within(ANSWER_TIMEOUT) && matches!((&self.reports).read(&mut byte), Ok(1)) {
            match libc::c_int::from(byte[0]) {
                echo if echo == ping() => break,
                other if other < 64 => self.received.set(self.received.get() | 1 << other),
                _ => {}
            }
        }
        let bit = 1u64 << signal.clamp(0, 63);
        let received = self.received.get();
        self.received.set(received & !bit);
        received & bit != 0
    }
}

impl SignalProbe {
    fn has_report_within(&self, timeout: Duration) -> bool {
        let mut poll = libc::pollfd { fd: self.reports.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one valid `pollfd` on this stack frame, and the count is 1. `self.reports` keeps the
        // descriptor open during the call.
        unsafe { libc::poll(&mut poll, 1, timeout.as_millis() as libc::c_int) == 1 }
    }
}

impl Drop for SignalProbe {
    fn drop(&mut self) {
        // SAFETY: the probe is a child that only this function collects, so its pid was not reused. A null status
        // pointer is allowed.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// The main loop of the probe process.
fn report_signals(reports: RawFd, parent: libc::pid_t) -> ! {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` initializes the set before its use. This process runs no other code afterwards, so nothing
    // uses the descriptors that are closed. All descriptors except the pipe are closed, so that the probe keeps no
    // other pipe open.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut());
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::prctl(libc::PR_SET_NAME, c"memtrace-signal".as_ptr());
        if libc::getppid() != parent {
            libc::_exit(0);
        }
        libc::dup2(reports, 0);
        if libc::syscall(libc::SYS_close_range, 1, libc::c_uint::MAX, 0) != 0 {
            for fd in 1..1024 {
                libc::close(fd);
            }
        }
        loop {
            let signal = libc::sigwaitinfo(all.as_ptr(), std::ptr::null_mut());
            let byte = signal as u8;
            if signal > 0 && libc::write(0, (&raw const byte).cast(), 1) != 1 {
                libc::_exit(0);
            }
        }
    }
}
