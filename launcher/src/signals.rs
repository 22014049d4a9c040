//! Handles signals while the command runs, so that the command gets each signal exactly once.
//!
//! The launcher blocks all signals that can be blocked and reads them from a descriptor. These rules apply:
//! - The kernel sends some signals to the whole process group: Ctrl-C, Ctrl-\, Ctrl-Z, a closed terminal, a new window
//!   size. The command has them already, so the launcher does nothing.
//! - A signal that another process sends to the launcher's pid is meant for the command. The launcher passes it on,
//!   including its value.
//! - A signal that another process sends to the whole group has reached the command too. The kernel does not
//!   distinguish the two cases. The [`SignalProbe`], another member of the group, does.
//! - When the terminal stops the command, the launcher stops too, because the shell that started it waits for that. A
//!   SIGCONT to the launcher alone is passed on like any other signal.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_setfl};

use crate::child::{Change, Child};
use crate::inherited::InheritedState;
use crate::signal_probe::SignalProbe;

/// The signals that the kernel sends to whole process groups.
const GROUP_SIGNALS: [libc::c_int; 8] = [
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTSTP,
    libc::SIGHUP,
    libc::SIGCONT,
    libc::SIGWINCH,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

/// `si_code` of a signal that the kernel itself generated (`asm-generic/siginfo.h`).
const SI_KERNEL: i32 = 0x80;

/// The signals with which a terminal stops programs.
const STOP_SIGNALS: [libc::c_int; 3] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// Signals that stay unblocked.
///
/// Faults belong to the launcher itself. Terminal access from the background must stop the launcher as it stops any
/// program.
const NOT_BLOCKED: [libc::c_int; 10] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGABRT,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGXFSZ,
];

fn blockable() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `set` is valid for writes. `sigfillset` initializes it before `sigdelset` and `assume_init` use it. All
    // signal numbers are constants of libc.
    unsafe {
        libc::sigfillset(set.as_mut_ptr());
        for signal in NOT_BLOCKED {
            libc::sigdelset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

/// Signals that end this process in its own time: blocked, and readable from a descriptor.
#[derive(Debug)]
pub(crate) struct EndSignals(OwnedFd);

impl EndSignals {
    /// Blocks Ctrl-C, SIGTERM and the end of the terminal, except those that the parent made this process ignore.
    /// Threads that start later inherit the mask.
    pub(crate) fn block() -> io::Result<EndSignals> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` initializes the set before its use. `action` is valid for writes, and zero-initialized,
        // so it is a valid `sigaction` even if the call fails. All signal numbers are constants of libc. `signalfd`
        // returns a new descriptor that nothing else owns.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                let mut action = MaybeUninit::<libc::sigaction>::zeroed();
                libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
                if action.assume_init().sa_sigaction != libc::SIG_IGN {
                    libc::sigaddset(set.as_mut_ptr(), signal);
                }
            }
            let error = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            let fd = libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC);
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(EndSignals(OwnedFd::from_raw_fd(fd))) }
        }
    }
}

/// Makes this process ignore what a terminal sends to all of its processes: its parent decides when it ends.
pub(crate) fn leave_end_to_parent() {
    for signal in [libc::SIGINT, libc::SIGHUP] {
        // SAFETY: `SIG_IGN` installs no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

impl AsFd for EndSignals {
    /// The descriptor becomes readable when a signal arrives.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The signals of this process, blocked and readable from a descriptor.
#[derive(Debug)]
pub(crate) struct Signals {
    fd: OwnedFd,
}

impl Signals {
    /// Blocks all signals that can be blocked. Threads that start later inherit the mask.
    pub(crate) fn block() -> io::Result<Signals> {
        let set = blockable();
        // SAFETY: `set` is an initialized signal set on this stack frame, and the null pointer asks for no old mask.
        // `signalfd` returns a new descriptor that nothing else owns.
        unsafe {
            let error = libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC);
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(Signals { fd: OwnedFd::from_raw_fd(fd) }) }
        }
    }

    /// Waits for the next signal. `None` when the read fails.
    fn next(&self) -> Option<libc::signalfd_siginfo> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: `info` has `size` bytes that are valid for writes, and `self.fd` is open. The kernel writes only
        // whole structures, so `assume_init` is sound when it wrote `size` bytes.
        unsafe {
            let n = libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), size);
            (n == size as isize).then(|| info.assume_init())
        }
    }

    /// Passes signals on until the command has ended, and returns its `wait(2)` status word. The child stays
    /// uncollected.
    pub(crate) fn forward_until_exit(&self, child: &Child, probe: Option<&SignalProbe>) -> i32 {
        // The signal of a stop that the launcher has not followed yet, and whether a SIGTSTP requested it.
        let (mut stopped, mut stop_requested) = (None, false);
        loop {
            // Check the child before reading a signal, because it may have ended earlier.
            if let Some(status) = child.exit_status() {
                return status;
            }
            while let Some(change) = child.change() {
                match change {
                    Change::Stopped(signal) => stopped = Some(signal),
                    Change::Continued => (stopped, stop_requested) = (None, false),
                }
            }
            // A pending SIGCONT may end this very stop.
            let stop_signal = stopped
                .filter(|s| stop_requested || STOP_SIGNALS.contains(s))
                .filter(|_| !is_pending(&[libc::SIGCONT]));
            if let Some(signal) = stop_signal {
                (stopped, stop_requested) = (None, false);
                stop_with(signal);
                // Stopping used up the launcher's own copy of this signal. Discard the probe's report of it, too.
                discard_reports(probe, &[signal]);
                continue;
            }
            let Some(info) = self.next() else { continue };
            let signal = info.ssi_signo as libc::c_int;
            if signal != libc::SIGCHLD && !has_reached_command(&info, child, probe) {
                child.signal(signal, queued_value(&info));
            }
            stop_requested |= signal == libc::SIGTSTP;
        }
    }

    /// Restores the signal mask from the start of the launcher. Signals that arrived meanwhile are discarded, because
    /// the command got them.
    pub(crate) fn unblock(self, state: &InheritedState) {
        if fcntl_setfl(&self.fd, OFlags::NONBLOCK).is_ok() {
            while self.next().is_some() {}
        }
        // SAFETY: `state.mask()` is the initialized mask that this process had at its start. The null pointer asks for
        // no old mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, state.mask(), std::ptr::null_mut()) };
    }
}

/// Whether the command has received this signal too.
fn has_reached_command(info: &libc::signalfd_siginfo, child: &Child, probe: Option<&SignalProbe>) -> bool {
    let signal = info.ssi_signo as libc::c_int;
    // The kernel drops pending stop signals when SIGCONT arrives, and pending SIGCONT when a stop signal arrives.
    // Earlier reports of the probe about those are obsolete.
    match signal {
        libc::SIGCONT => discard_reports(probe, &STOP_SIGNALS),
        libc::SIGTSTP => discard_reports(probe, &[libc::SIGCONT]),
        _ => {}
    }
    // Always ask, so that an old answer is never mistaken for a new one.
    let group = probe.is_some_and(|p| p.has_received(signal));
    if info.ssi_code == SI_KERNEL {
        return GROUP_SIGNALS.contains(&signal);
    }
    // A new stop signal overtook this SIGCONT, and the kernel dropped the probe's copy.
    if signal == libc::SIGCONT && is_pending(&STOP_SIGNALS) {
        return true;
    }
    // A signal that the command sends to its parent is not meant for the command.
    group || info.ssi_pid as libc::pid_t == child.pid()
}

fn discard_reports(probe: Option<&SignalProbe>, signals: &[libc::c_int]) {
    if let Some(probe) = probe {
        for signal in signals {
            probe.has_received(*signal);
        }
    }
}

/// The value of a signal sent with `sigqueue`. `None` for other signals.
fn queued_value(info: &libc::signalfd_siginfo) -> Option<libc::sigval> {
    const SI_QUEUE: i32 = -1;
    (info.ssi_code == SI_QUEUE).then_some(libc::sigval { sival_ptr: info.ssi_ptr as *mut libc::c_void })
}

/// Whether one of these signals has arrived and was not read yet.
fn is_pending(signals: &[libc::c_int]) -> bool {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `set` is valid for writes and zero-initialized, so it is a valid `sigset_t` even if `sigpending` fails.
    // The signal numbers are constants of libc.
    unsafe {
        libc::sigpending(set.as_mut_ptr());
        signals.iter().any(|signal| libc::sigismember(set.as_ptr(), *signal) == 1)
    }
}

/// Stops this process with the signal that stopped the command. Returns after SIGCONT.
fn stop_with(signal: libc::c_int) {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initializes the set before its use. The disposition of these signals is the default or
    // ignored, so no signal handler runs.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::kill(libc::getpid(), signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}
