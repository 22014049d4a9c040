//! Runs the user's program under a recording launcher, as `memtrace run` does, and can end it.
//!
//! The program and its launcher get a process group of their own, so that one signal ends both. Ctrl-C then ends them
//! and not doctor, which still prints its report. On a terminal that group is the foreground group while the program
//! runs.

use std::ffi::OsString;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::inherited::InheritedState;
use crate::proc::ProcessDir;

/// How often deadlines are checked. Signals end a wait earlier.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long a program may take to end after a request.
const GRACE_PERIOD: Duration = Duration::from_secs(5);

/// The result of the run.
#[derive(Debug)]
pub(super) struct CommandResult {
    /// The launcher's exit status, which is the program's. `None` when a signal ended the launcher.
    pub(super) code: Option<i32>,
    /// Whether doctor ended the program at the time limit.
    pub(super) stopped: bool,
    pub(super) duration: Duration,
}

/// A terminal on which this process's group is the foreground group.
struct Terminal {
    ours: libc::pid_t,
}

impl Terminal {
    fn ours() -> Option<Terminal> {
        // SAFETY: the calls take no pointers. Without a terminal `tcgetpgrp` returns an error, which is not equal to
        // the group.
        let (ours, foreground) = unsafe { (libc::getpgrp(), libc::tcgetpgrp(libc::STDIN_FILENO)) };
        (ours == foreground).then_some(Terminal { ours })
    }

    /// Makes `group` the foreground group. The caller must block SIGTTOU.
    fn give(&self, group: libc::pid_t) {
        // SAFETY: `tcsetpgrp` takes two integers and accesses no memory of ours.
        unsafe { libc::tcsetpgrp(libc::STDIN_FILENO, group) };
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.give(self.ours);
    }
}

/// The signals that doctor waits for, so that they do not end it.
fn signals() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initializes `set` before `sigaddset` and `assume_init` use it. The signal numbers are
    // constants of libc.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in [libc::SIGCHLD, libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGTTOU] {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

/// Records `command` into `folder` and ends it after `limit`.
///
/// With `to_stderr` the program's output goes to stderr, because doctor's stdout is machine-readable. Fails when the
/// launcher cannot be started.
pub(super) fn run(
    state: InheritedState,
    command: &[OsString],
    folder: &Path,
    limit: Option<Duration>,
    to_stderr: bool,
) -> io::Result<CommandResult> {
    let signals = signals();
    // SAFETY: `signals` is an initialized set on this stack frame. The null pointer asks for no old mask.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut()) };
    let terminal = Terminal::ours();
    let on_terminal = terminal.is_some();
    let mut memtrace = Command::new(std::env::current_exe()?);
    memtrace.args(["run", "--quiet", "--no-snapshot", "-o"]).arg(folder).arg("--").args(command);
    if to_stderr {
        // SAFETY: nothing else owns the new descriptor of a successful `dup`. stderr is open here, so `dup` fails only
        // without free descriptors.
        let stderr = unsafe { <Stdio as std::os::fd::FromRawFd>::from_raw_fd(libc::dup(libc::STDERR_FILENO)) };
        memtrace.stdout(stderr);
    }
    // SAFETY: the closure makes only async-signal-safe calls, as `pre_exec` requires between fork and exec.
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
            // When doctor is killed, the launcher gets this signal and passes it on to the program.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            state.restore()
        });
    }
    let began = Instant::now();
    let launcher = memtrace.spawn()?.id();
    let group = launcher as libc::pid_t;
    let mut stopped = false;
    let mut end_requested: Option<Instant> = None;
    // SAFETY: `kill` takes two integers. The launcher leads the group and is collected only at the end of this
    // function, so the group id was not reused.
    let send = |signal| unsafe { libc::kill(-group, signal) };
    let code = loop {
        match wait(group)? {
            Change::Ended(code) => break code,
            Change::Stopped => {
                // The user stopped the program from the terminal and expects the shell. Stop doctor too, and continue
                // both together.
                if let Some(terminal) = &terminal {
                    terminal.give(terminal.ours);
                    // SAFETY: `raise` takes an integer and accesses no memory of ours.
                    unsafe { libc::raise(libc::SIGSTOP) };
                    terminal.give(group);
                    send(libc::SIGCONT);
                }
            }
            Change::None => {}
        }
        if end_requested.is_none() && limit.is_some_and(|limit| began.elapsed() >= limit) {
            stopped = true;
            end_requested = Some(Instant::now());
            send(libc::SIGTERM);
        }
        // Kill the launcher last, so that it can complete the recording.
        if end_requested.is_some_and(|at| at.elapsed() >= 2 * GRACE_PERIOD) {
            send(libc::SIGKILL);
        } else if end_requested.is_some_and(|at| at.elapsed() >= GRACE_PERIOD) {
            descendants(launcher).into_iter().for_each(|pid| send_signal(pid, libc::SIGKILL));
        }
        let signal = next_signal(&signals, POLL_INTERVAL);
        if let Some(signal @ (libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT)) = signal {
            end_requested.get_or_insert_with(Instant::now);
            send(signal);
        }
    };
    let duration = began.elapsed();
    drop(terminal);
    // SAFETY: `signals` is the initialized set that was blocked at the start of this function. A signal that arrived
    // meanwhile ends doctor now.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &signals, std::ptr::null_mut()) };
    Ok(CommandResult { code, stopped, duration })
}

/// All direct and indirect children of a process that still have their parent.
fn descendants(of: u32) -> Vec<u32> {
    let mut all = ProcessDir::of(of).children();
    let mut next = 0;
    while let Some(pid) = all.get(next) {
        all.extend(ProcessDir::of(*pid).children());
        next += 1;
    }
    all
}

fn send_signal(pid: u32, signal: libc::c_int) {
    // SAFETY: `kill` takes two integers and accesses no memory of ours. `pid` was a descendant of the program a moment
    // ago.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
}

enum Change {
    None,
    Stopped,
    /// The process exited with this status. `None` when a signal ended it.
    Ended(Option<i32>),
}

fn wait(pid: libc::pid_t) -> io::Result<Change> {
    let mut status = 0;
    // SAFETY: `pid` is a child of this process, and `status` is valid for writes.
    match unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG | libc::WUNTRACED) } {
        0 => Ok(Change::None),
        -1 => Err(io::Error::last_os_error()),
        _ if libc::WIFSTOPPED(status) => Ok(Change::Stopped),
        _ => Ok(Change::Ended(libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)))),
    }
}

fn next_signal(signals: &libc::sigset_t, within: Duration) -> Option<libc::c_int> {
    let timeout = libc::timespec { tv_sec: 0, tv_nsec: within.as_nanos() as libc::c_long };
    // SAFETY: `signals` is an initialized set, and `timeout` is a valid time on this stack frame. The null pointer asks
    // for no signal details.
    let signal = unsafe { libc::sigtimedwait(signals, std::ptr::null_mut(), &timeout) };
    (signal > 0).then_some(signal)
}
