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
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getppid, kill_process, set_parent_process_death_signal, waitpid,
};

/// How long a group signal may take to reach the probe after the launcher. The kernel signals the whole group in one
/// pass.
const DELIVERY_DELAY: Duration = Duration::from_millis(2);
/// How long the probe may take to answer. Another process may have stopped it.
const ANSWER_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// A handle to the probe process.
#[derive(Debug)]
pub(crate) struct SignalProbe {
    pid: Pid,
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
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        let parent = getpid();
        // SAFETY: the process has one thread, which the caller of `start` guarantees. No lock can therefore be held in
        // the child, and it may call any function.
        let pid = match unsafe { libc::fork() } {
            -1 => return Err(io::Error::last_os_error()),
            child => Pid::from_raw(child),
        };
        match pid {
            None => report_signals(writer.as_raw_fd(), parent),
            Some(pid) => Ok(SignalProbe { pid, reports: reader.into(), received: Cell::new(0) }),
        }
    }

    /// Whether the probe also received this signal since the last query for it.
    ///
    /// False when the probe does not answer.
    pub(crate) fn has_received(&self, signal: libc::c_int) -> bool {
        std::thread::sleep(DELIVERY_DELAY);
        // rustix sends no real-time signals.
        // SAFETY: `kill` takes two integers. The probe is a child that is not collected before drop, so its pid was not
        // reused.
        if unsafe { libc::kill(self.pid.as_raw_nonzero().get(), ping()) } != 0 {
            return false;
        }
        let mut byte = [0u8];
        while self.has_report_in_time() && matches!((&self.reports).read(&mut byte), Ok(1)) {
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
    fn has_report_in_time(&self) -> bool {
        poll(&mut [PollFd::new(&self.reports, PollFlags::IN)], Some(&ANSWER_TIMEOUT)) == Ok(1)
    }
}

impl Drop for SignalProbe {
    fn drop(&mut self) {
        // The probe is a child that only this function collects, so its pid was not reused.
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }
}

/// The main loop of the probe process.
fn report_signals(reports: RawFd, parent: Pid) -> ! {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` initializes the set before its use. This process runs no other code afterwards, so nothing
    // uses the descriptors that are closed. All descriptors except the pipe are closed, so that the probe keeps no
    // other pipe open.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut());
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
        let _ = rustix::thread::set_name(c"memtrace-signal");
        if getppid() != Some(parent) {
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
