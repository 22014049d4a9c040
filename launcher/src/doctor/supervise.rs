//! Runs the user's program under a recording launcher, as `memtrace run` does, and can end it.
//!
//! The program and its launcher get a process group of their own, so that one signal ends both. Ctrl-C then ends them
//! and not doctor, which still prints its report. On a terminal that group is the foreground group while the program
//! runs.

use std::ffi::OsString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitOptions, getpgrp, getpid, kill_process, kill_process_group, set_parent_process_death_signal,
    setpgid, waitpid,
};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use crate::inherited::InheritedState;
use crate::output::Stream;
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
    ours: Pid,
}

impl Terminal {
    fn ours() -> Option<Terminal> {
        let ours = getpgrp();
        // Without a terminal this is an error.
        (tcgetpgrp(io::stdin()) == Ok(ours)).then_some(Terminal { ours })
    }

    /// Makes `group` the foreground group. The caller must block SIGTTOU.
    fn give(&self, group: Pid) {
        let _ = tcsetpgrp(io::stdin(), group);
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
        memtrace.stdout(Stream::Stderr.as_fd().try_clone_to_owned()?);
    }
    // SAFETY: the closure makes only async-signal-safe calls, as `pre_exec` requires between fork and exec: rustix
    // makes the system calls itself. Standard input is open, because Rust's runtime opens it.
    unsafe {
        memtrace.pre_exec(move || {
            let _ = setpgid(None, None);
            if on_terminal {
                let mut out = MaybeUninit::<libc::sigset_t>::uninit();
                libc::sigemptyset(out.as_mut_ptr());
                libc::sigaddset(out.as_mut_ptr(), libc::SIGTTOU);
                libc::pthread_sigmask(libc::SIG_BLOCK, out.as_ptr(), std::ptr::null_mut());
                let _ = tcsetpgrp(BorrowedFd::borrow_raw(libc::STDIN_FILENO), getpid());
            }
            // When doctor is killed, the launcher gets this signal and passes it on to the program.
            let _ = set_parent_process_death_signal(Some(Signal::TERM));
            state.restore()
        });
    }
    let began = Instant::now();
    let launcher = memtrace.spawn()?;
    let group = Pid::from_child(&launcher);
    let mut stopped = false;
    let mut end_requested: Option<Instant> = None;
    // The launcher leads the group and is collected only at the end of this function, so the group id was not reused.
    let send = |signal| {
        let _ = kill_process_group(group, signal);
    };
    let code = loop {
        match wait(group)? {
            Change::Ended(code) => break code,
            Change::Stopped => {
                // The user stopped the program from the terminal and expects the shell. Stop doctor too, and continue
                // both together.
                if let Some(terminal) = &terminal {
                    terminal.give(terminal.ours);
                    let _ = kill_process(getpid(), Signal::STOP);
                    terminal.give(group);
                    send(Signal::CONT);
                }
            }
            Change::None => {}
        }
        if end_requested.is_none() && limit.is_some_and(|limit| began.elapsed() >= limit) {
            stopped = true;
            end_requested = Some(Instant::now());
            send(Signal::TERM);
        }
        // Kill the launcher last, so that it can complete the recording.
        if end_requested.is_some_and(|at| at.elapsed() >= 2 * GRACE_PERIOD) {
            send(Signal::KILL);
        } else if end_requested.is_some_and(|at| at.elapsed() >= GRACE_PERIOD) {
            descendants(launcher.id()).into_iter().for_each(kill);
        }
        let signal = next_signal(&signals, POLL_INTERVAL);
        if let Some(signal @ (Signal::INT | Signal::TERM | Signal::HUP | Signal::QUIT)) = signal {
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

/// Kills a process that was a descendant of the program a moment ago.
fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
}

enum Change {
    None,
    Stopped,
    /// The process exited with this status. `None` when a signal ended it.
    Ended(Option<i32>),
}

fn wait(pid: Pid) -> io::Result<Change> {
    Ok(match waitpid(Some(pid), WaitOptions::NOHANG | WaitOptions::UNTRACED)? {
        None => Change::None,
        Some((_, status)) if status.stopped() => Change::Stopped,
        Some((_, status)) => Change::Ended(status.exit_status()),
    })
}

fn next_signal(signals: &libc::sigset_t, within: Duration) -> Option<Signal> {
    let timeout = libc::timespec { tv_sec: 0, tv_nsec: within.as_nanos() as libc::c_long };
    // SAFETY: `signals` is an initialized set, and `timeout` is a valid time on this stack frame. The null pointer asks
    // for no signal details.
    let signal = unsafe { libc::sigtimedwait(signals, std::ptr::null_mut(), &timeout) };
    Signal::from_named_raw(signal)
}
