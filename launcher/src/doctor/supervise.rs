//! Runs the user's program under a recording launcher, as `memtrace run` would, and can end it.
//!
//! The program and the launcher get a process group of their own: so that they can be ended together, and so that Ctrl-C ends them
//! and not doctor, which still has to say what was seen. On a terminal that group is the foreground one meanwhile.

use std::ffi::OsString;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::inherited::State;
use crate::proc::ProcessDir;

/// A signal ends a wait; this is for deadlines.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long a program may take to end when it is asked to.
const GRACE: Duration = Duration::from_secs(5);

/// What came of it.
#[derive(Debug)]
pub(super) struct Ended {
    /// The launcher's exit status, which is the program's.
    pub(super) code: Option<i32>,
    /// Whether it was ended because its time was up.
    pub(super) stopped: bool,
    pub(super) took: Duration,
}

/// The terminal whose foreground group we are.
struct Terminal {
    ours: libc::pid_t,
}

impl Terminal {
    fn ours() -> Option<Terminal> {
        // SAFETY: plain calls; without a terminal the second fails.
        let (ours, foreground) = unsafe { (libc::getpgrp(), libc::tcgetpgrp(libc::STDIN_FILENO)) };
        (ours == foreground).then_some(Terminal { ours })
    }

    /// Makes a group the foreground one. SIGTTOU must be blocked.
    fn give(&self, group: libc::pid_t) {
        // SAFETY: a plain call.
        unsafe { libc::tcsetpgrp(libc::STDIN_FILENO, group) };
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.give(self.ours);
    }
}

/// The signals that doctor waits for instead of dying of them.
fn signals() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is filled before use.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in [libc::SIGCHLD, libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGTTOU] {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

/// Records `command` into `folder`. `to_stderr`: the program's output goes there, since ours is to be read by a program.
pub(super) fn run(
    state: State,
    command: &[OsString],
    folder: &Path,
    limit: Option<Duration>,
    to_stderr: bool,
) -> io::Result<Ended> {
    let signals = signals();
    // SAFETY: a filled set.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut()) };
    let terminal = Terminal::ours();
    let on_terminal = terminal.is_some();
    let mut memtrace = Command::new(std::env::current_exe()?);
    memtrace.args(["run", "--quiet", "--no-snapshot", "-o"]).arg(folder).arg("--").args(command);
    if to_stderr {
        // SAFETY: a duplicate of a descriptor is ours.
        let stderr = unsafe { <Stdio as std::os::fd::FromRawFd>::from_raw_fd(libc::dup(libc::STDERR_FILENO)) };
        memtrace.stdout(stderr);
    }
    // SAFETY: async-signal-safe calls only.
    unsafe {
        memtrace.pre_exec(move || {
            libc::setpgid(0, 0);
            if on_terminal {
                let mut out = MaybeUninit::<libc::sigset_t>::uninit();
                libc::sigemptyset(out.as_mut_ptr());
                libc::sigaddset(out.as_mut_ptr(), libc::SIGTTOU);
                libc::pthread_sigmask(libc::SIG_BLOCK, out.as_ptr(), std::ptr::null_mut());
                libc::tcsetpgrp(libc::STDIN_FILENO, libc::getpid());
            }
            // When doctor is killed, the launcher passes this on to the program.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            state.restore()
        });
    }
    let began = Instant::now();
    let launcher = memtrace.spawn()?.id();
    let group = launcher as libc::pid_t;
    let mut stopped = false;
    let mut asked: Option<Instant> = None;
    // SAFETY: the group of a child that is collected at the end of this function.
    let send = |signal| unsafe { libc::kill(-group, signal) };
    let code = loop {
        match wait(group)? {
            Change::Ended(code) => break code,
            Change::Stopped => {
                // Who has stopped it from the terminal wants the shell: we stop as well, and go on together.
                if let Some(terminal) = &terminal {
                    terminal.give(terminal.ours);
                    // SAFETY: a plain call.
                    unsafe { libc::raise(libc::SIGSTOP) };
                    terminal.give(group);
                    send(libc::SIGCONT);
                }
            }
            Change::None => {}
        }
        if asked.is_none() && limit.is_some_and(|limit| began.elapsed() >= limit) {
            stopped = true;
            asked = Some(Instant::now());
            send(libc::SIGTERM);
        }
        // The launcher goes last, so that the recording has an end.
        if asked.is_some_and(|at| at.elapsed() >= 2 * GRACE) {
            send(libc::SIGKILL);
        } else if asked.is_some_and(|at| at.elapsed() >= GRACE) {
            descendants(launcher).into_iter().for_each(|pid| end(pid, libc::SIGKILL));
        }
        let signal = next_signal(&signals, LOOK_EVERY);
        if let Some(signal @ (libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT)) = signal {
            asked.get_or_insert_with(Instant::now);
            send(signal);
        }
    };
    let took = began.elapsed();
    drop(terminal);
    // SAFETY: the set that was blocked above. A signal that came meanwhile ends us now.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &signals, std::ptr::null_mut()) };
    Ok(Ended { code, stopped, took })
}

/// Everything a process has started, directly or not, and that still has its parent.
fn descendants(of: u32) -> Vec<u32> {
    let mut all = ProcessDir::of(of).children();
    let mut next = 0;
    while let Some(pid) = all.get(next) {
        all.extend(ProcessDir::of(*pid).children());
        next += 1;
    }
    all
}

fn end(pid: u32, signal: libc::c_int) {
    // SAFETY: a plain call; the process was part of the program a moment ago.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
}

enum Change {
    None,
    Stopped,
    /// With this exit status; `None`: it was killed.
    Ended(Option<i32>),
}

fn wait(pid: libc::pid_t) -> io::Result<Change> {
    let mut status = 0;
    // SAFETY: a place for the status of our own child.
    match unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG | libc::WUNTRACED) } {
        0 => Ok(Change::None),
        -1 => Err(io::Error::last_os_error()),
        _ if libc::WIFSTOPPED(status) => Ok(Change::Stopped),
        _ => Ok(Change::Ended(libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)))),
    }
}

fn next_signal(signals: &libc::sigset_t, within: Duration) -> Option<libc::c_int> {
    let timeout = libc::timespec { tv_sec: 0, tv_nsec: within.as_nanos() as libc::c_long };
    // SAFETY: a filled set and a valid time.
    let signal = unsafe { libc::sigtimedwait(signals, std::ptr::null_mut(), &timeout) };
    (signal > 0).then_some(signal)
}
