//! Signals while the command runs: the launcher is to be as if it were not there.
//!
//! All signals that can be blocked are blocked and read from a descriptor. Then:
//! - What the kernel sends to a whole process group (Ctrl-C, Ctrl-\, Ctrl-Z, a closed terminal, a new window size) has reached the
//!   command already: nothing to do.
//! - What somebody sent to the launcher's pid is meant for the command: passed on, value included.
//! - What somebody sent to the whole group has reached the command too. The kernel does not say which of the two it was; the
//!   [`Witness`], another member of the group, does.
//! - When the command is stopped from the terminal, so are we: the shell that started us waits for that. A SIGCONT to us alone
//!   is passed on like any other signal.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::child::{Change, Child};
use crate::inherited::State;
use crate::witness::Witness;

/// The kernel sends these to whole process groups.
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

/// `si_code` of a signal that the kernel made itself (`asm-generic/siginfo.h`).
const SI_KERNEL: i32 = 0x80;

/// A terminal stops programs with these.
const STOPS: [libc::c_int; 3] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// Signals that are left alone: faults are ours, and writing to or reading from a terminal from the background should stop us
/// as it would any program.
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

fn blocked() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises the set; the signal numbers are valid.
    unsafe {
        libc::sigfillset(set.as_mut_ptr());
        for signal in NOT_BLOCKED {
            libc::sigdelset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

/// The signals of this process, blocked and readable.
#[derive(Debug)]
pub(crate) struct Signals {
    fd: OwnedFd,
}

impl Signals {
    /// Blocks what can be blocked. Threads made from now on inherit that.
    pub(crate) fn block() -> io::Result<Signals> {
        let set = blocked();
        // SAFETY: a valid set; the descriptor is new and ours.
        unsafe {
            let error = libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC);
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(Signals { fd: OwnedFd::from_raw_fd(fd) }) }
        }
    }

    /// Waits for the next signal.
    fn next(&self) -> Option<libc::signalfd_siginfo> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the kernel writes whole structures of this size or nothing.
        unsafe {
            let n = libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), size);
            (n == size as isize).then(|| info.assume_init())
        }
    }

    /// Stays until the command has ended, passing signals on; gives its wait status. The child is left uncollected.
    pub(crate) fn watch(&self, child: &Child, witness: Option<&Witness>) -> i32 {
        // A stop of the command that we have not followed, and whether the terminal asked for one.
        let (mut stopped, mut asked) = (None, false);
        loop {
            // First the state, then the signals: a child may have ended before the first signal is read.
            if let Some(status) = child.ended() {
                return status;
            }
            while let Some(change) = child.change() {
                match change {
                    Change::Stopped(signal) => stopped = Some(signal),
                    Change::Continued => (stopped, asked) = (None, false),
                }
            }
            // A continuation that is waiting to be read may be the end of this very stop.
            let terminal = stopped.filter(|s| asked || STOPS.contains(s)).filter(|_| !is_pending(&[libc::SIGCONT]));
            if let Some(signal) = terminal {
                (stopped, asked) = (None, false);
                stop_as(signal);
                // Ours was used up by stopping.
                forget(witness, &[signal]);
                continue;
            }
            let Some(info) = self.next() else { continue };
            let signal = info.ssi_signo as libc::c_int;
            if signal != libc::SIGCHLD && !reached_the_command(&info, child, witness) {
                child.signal(signal, queued_value(&info));
            }
            asked |= signal == libc::SIGTSTP;
        }
    }

    /// Back to the mask we were started with, forgetting what arrived meanwhile: the command has had its share.
    pub(crate) fn unblock(self, state: &State) {
        let fd = self.fd.as_raw_fd();
        // SAFETY: an open descriptor; then the mask this process had before.
        unsafe {
            libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK);
            while self.next().is_some() {}
            libc::pthread_sigmask(libc::SIG_SETMASK, state.mask(), std::ptr::null_mut());
        }
    }
}

/// Whether the command got this signal too.
fn reached_the_command(info: &libc::signalfd_siginfo, child: &Child, witness: Option<&Witness>) -> bool {
    let signal = info.ssi_signo as libc::c_int;
    // The kernel drops pending stops when a continuation comes, and the other way round: what the witness saw of those says
    // nothing any more.
    match signal {
        libc::SIGCONT => forget(witness, &STOPS),
        libc::SIGTSTP => forget(witness, &[libc::SIGCONT]),
        _ => {}
    }
    // Always asked, so that an old answer is never taken for a new one.
    let group = witness.is_some_and(|w| w.has_seen(signal));
    if info.ssi_code == SI_KERNEL {
        return GROUP_SIGNALS.contains(&signal);
    }
    // A continuation overtaken by a new stop, which made the witness forget it.
    if signal == libc::SIGCONT && is_pending(&STOPS) {
        return true;
    }
    // What the command sends its parent is not meant for the command.
    group || info.ssi_pid as libc::pid_t == child.pid()
}

fn forget(witness: Option<&Witness>, signals: &[libc::c_int]) {
    if let Some(witness) = witness {
        for signal in signals {
            witness.has_seen(*signal);
        }
    }
}

/// The value of a signal that was sent by sigqueue.
fn queued_value(info: &libc::signalfd_siginfo) -> Option<libc::sigval> {
    const SI_QUEUE: i32 = -1;
    (info.ssi_code == SI_QUEUE).then_some(libc::sigval { sival_ptr: info.ssi_ptr as *mut libc::c_void })
}

/// Whether one of these has arrived and has not been read.
fn is_pending(signals: &[libc::c_int]) -> bool {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: sigpending fills the set.
    unsafe {
        libc::sigpending(set.as_mut_ptr());
        signals.iter().any(|signal| libc::sigismember(set.as_ptr(), *signal) == 1)
    }
}

/// Stops this process with the signal that stopped the command, until somebody continues it.
fn stop_as(signal: libc::c_int) {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is initialised before it is used; the dispositions of these signals are the default or ignored, so no
    // code of ours runs.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::kill(libc::getpid(), signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
    }
}
