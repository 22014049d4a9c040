//! A small process in our process group that tells whether a signal was sent to the group or to us alone.
//!
//! `kill PID` and `kill -- -PGID` look the same to the receiver. With the first, the command has not got the signal and we pass
//! it on; with the second it has, and a second one would be one too many (a second Ctrl-C aborts many a clean-up). The witness
//! blocks all signals and reports each over a pipe. To ask, we send it a real-time signal, which the kernel delivers after any
//! ordinary one that is pending; its echo means that everything before has been reported.
//!
//! It shares our group, so it must not outlive us: the kernel kills it when we die.

use std::cell::Cell;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// How long a group signal may take from us to the witness: the kernel walks the group in one go.
const SETTLE: Duration = Duration::from_millis(2);
/// How long the witness may take to answer; it may have been stopped by somebody.
const PATIENCE: Duration = Duration::from_millis(200);

/// The witness process.
#[derive(Debug)]
pub(crate) struct Witness {
    pid: libc::pid_t,
    reports: std::fs::File,
    /// Bit `n` is set when signal `n` was reported and not yet asked for.
    seen: Cell<u64>,
}

fn ping() -> libc::c_int {
    libc::SIGRTMAX()
}

impl Witness {
    /// Starts the witness. Must be called while this process has one thread.
    pub(crate) fn start() -> io::Result<Witness> {
        let mut ends: [RawFd; 2] = [-1; 2];
        // SAFETY: room for two descriptors, which are new and ours.
        let (reader, writer) = unsafe {
            if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
                return Err(io::Error::last_os_error());
            }
            (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
        };
        // SAFETY: plain calls; with one thread the child may do anything, and it does little.
        unsafe {
            let parent = libc::getpid();
            match libc::fork() {
                -1 => Err(io::Error::last_os_error()),
                0 => report_signals(writer.as_raw_fd(), parent),
                pid => Ok(Witness { pid, reports: reader.into(), seen: Cell::new(0) }),
            }
        }
    }

    /// Whether the witness got this signal as well, since the last time it was asked.
    pub(crate) fn has_seen(&self, signal: libc::c_int) -> bool {
        std::thread::sleep(SETTLE);
        // SAFETY: the witness is our child and has not been collected, so the pid is its own.
        if unsafe { libc::kill(self.pid, ping()) } != 0 {
            return false;
        }
        let mut byte = [0u8];
        while self.reports_within(PATIENCE) && matches!((&self.reports).read(&mut byte), Ok(1)) {
            match libc::c_int::from(byte[0]) {
                echo if echo == ping() => break,
                other if other < 64 => self.seen.set(self.seen.get() | 1 << other),
                _ => {}
            }
        }
        let bit = 1u64 << signal.clamp(0, 63);
        let seen = self.seen.get();
        self.seen.set(seen & !bit);
        seen & bit != 0
    }
}

impl Witness {
    fn reports_within(&self, timeout: Duration) -> bool {
        let mut poll = libc::pollfd { fd: self.reports.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        unsafe { libc::poll(&mut poll, 1, timeout.as_millis() as libc::c_int) == 1 }
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        // SAFETY: our own child, collected here.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// The witness's life.
fn report_signals(reports: RawFd, parent: libc::pid_t) -> ! {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is filled before use. Every descriptor but the pipe is closed, so that the witness holds nobody's
    // pipe open; this process executes nothing else any more.
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
