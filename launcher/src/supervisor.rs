//! The process that runs memtrace for the tools `run` and `dry_run`: this program once more, under another name.
//!
//! It ends with everything that memtrace and its command have started. A process that leaves its parents (by two forks
//! and `setsid`, say) becomes a child of this one, which is the subreaper of all of them. The server cannot be that:
//! its analyses are its children too, and it may be killed. Then this process gets SIGTERM, as at the time limit.

use std::collections::HashSet;
use std::ffi::OsString;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, set_child_subreaper,
    set_parent_process_death_signal, wait, waitpid,
};

use crate::inherited;
use crate::message;
use crate::proc::descendants;
use crate::signals::EndSignals;

/// The name of the process: its first argument.
const NAME: &str = "memtrace-supervise";
/// The exit code if memtrace cannot be started, as that of memtrace.
const FAILED: u8 = 125;
/// How long processes may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);
/// How long memtrace may take to write its report after its command was killed.
const REPORT_TIME: Duration = Duration::from_secs(120);
/// How often to collect processes that have ended.
const COLLECTION: Duration = Duration::from_secs(1);
/// How many times the children are listed and killed before all processes are.
const MAX_ROUNDS: u32 = 1000;
/// How often to look for processes that have not ended.
const PAUSE: Duration = Duration::from_millis(10);
/// How long this process takes at most from SIGTERM to its end.
pub(crate) const END_TIME: Duration = Duration::from_secs(10 + 120 + 10 + 10 + 10);

/// A command line that runs the program `binary` in this way. Its arguments follow.
pub(crate) fn command(binary: &Path) -> Command {
    // Not the binary itself: another version may have been installed meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command.arg0(NAME).arg(binary);
    // SAFETY: the function makes one system call, and allocates nothing. It runs between fork and exec.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
    }
    command
}

/// The command line of memtrace, if this is such a process.
pub(crate) fn requested() -> Option<Vec<OsString>> {
    let mut arguments = std::env::args_os();
    (arguments.next()? == NAME).then(|| arguments.collect())
}

/// Runs memtrace, ends what it leaves, and returns its exit code.
pub(crate) fn run(arguments: Vec<OsString>) -> u8 {
    message::use_prefix();
    supervise(&arguments).unwrap_or_else(|e| {
        message::report(&e);
        FAILED
    })
}

fn supervise(arguments: &[OsString]) -> anyhow::Result<u8> {
    let (binary, arguments) = arguments.split_first().context("no program given")?;
    set_child_subreaper(Some(getpid())).context("cannot become the subreaper of the run")?;
    let mask = signal_mask();
    let signals = EndSignals::block().context("cannot block signals")?;
    let mut command = Command::new(binary);
    inherited::restore_umask(&mut command);
    command.args(arguments);
    // SAFETY: the function makes two system calls, and allocates nothing. It runs between fork and exec. `mask` is an
    // initialized set, and the null pointer asks for no old one.
    unsafe {
        command.pre_exec(move || {
            libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
            Ok(set_parent_process_death_signal(Some(Signal::TERM))?)
        });
    }
    let mut memtrace = command.spawn().with_context(|| format!("cannot execute {}", Path::new(binary).display()))?;
    wait_until_end(&memtrace, &signals)?;
    let status = memtrace.wait().context("cannot wait for memtrace")?;
    let ended = end_rest();
    if ended > 0 {
        let processes = if ended == 1 { "1 process".to_owned() } else { format!("{ended} processes") };
        message::note(&format!("ended {processes} that the command had left in the background"));
    }
    Ok(crate::child::exit_code(std::os::unix::process::ExitStatusExt::into_raw(status)))
}

/// The signals that this thread blocks.
fn signal_mask() -> libc::sigset_t {
    let mut mask = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `mask` is writable, and zeros are a valid set. The null pointer changes nothing.
    unsafe {
        libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), mask.as_mut_ptr());
        mask.assume_init()
    }
}

/// Waits for the end of memtrace. When this process is asked to end, memtrace is, so that it writes the run. Then its
/// command is killed, and at last memtrace.
fn wait_until_end(memtrace: &Child, signals: &EndSignals) -> anyhow::Result<()> {
    let pid = Pid::from_child(memtrace);
    let child = pidfd_open(pid, PidfdFlags::empty()).context("cannot wait for memtrace")?;
    let mut steps = [GRACE, REPORT_TIME].into_iter();
    let mut end: Option<Instant> = None;
    loop {
        let left = end.map_or(COLLECTION, |end| end.saturating_duration_since(Instant::now()).min(COLLECTION));
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut fds = vec![PollFd::new(&child, PollFlags::IN)];
        if end.is_none() {
            fds.push(PollFd::new(signals, PollFlags::IN));
        }
        match poll(&mut fds, Some(&left)) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(std::io::Error::from(e)).context("cannot wait for memtrace"),
            Ok(_) if fds.first().is_some_and(|fd| !fd.revents().is_empty()) => return Ok(()),
            Ok(0) if end.is_none_or(|end| Instant::now() < end) => {
                collect_others(pid);
                continue;
            }
            Ok(_) => {}
        }
        // memtrace passes SIGTERM on to its command. An error means that the process has ended.
        match (end, steps.next()) {
            (None, time) => {
                let _ = kill_process(pid, Signal::TERM);
                end = time.map(|time| Instant::now() + time);
            }
            (Some(_), Some(time)) => {
                kill_all(&programs(pid), Signal::KILL);
                end = Some(Instant::now() + time);
            }
            (Some(_), None) => {
                let _ = kill_process(pid, Signal::KILL);
                // A process that is being killed ends when the kernel can end it.
                end = Some(Instant::now() + REPORT_TIME);
            }
        }
    }
}

/// Collects the children of this process that have ended, apart from memtrace.
fn collect_others(memtrace: Pid) {
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: `info` is writable, and zeros are a valid `siginfo_t`. Without a child that has ended, its pid stays
        // 0.
        let ended = unsafe {
            let _ = libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), flags);
            info.assume_init().si_pid()
        };
        let Some(ended) = Pid::from_raw(ended).filter(|pid| *pid != memtrace) else { return };
        let _ = waitpid(Some(ended), WaitOptions::NOHANG);
    }
}

/// Ends all processes that have become children of this one, and theirs. Returns how many there were.
fn end_rest() -> usize {
    let mut all = HashSet::new();
    for signal in [Signal::TERM, Signal::KILL] {
        let end = Instant::now() + GRACE;
        loop {
            if signal == Signal::KILL {
                kill_children();
            }
            // Those that have ended are no longer in the list, as soon as they were waited for.
            while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
            let rest = descendants(getpid());
            if rest.is_empty() {
                return all.len();
            }
            if Instant::now() >= end {
                break;
            }
            // One that was started meanwhile gets the signal too.
            let new: Vec<Pid> = rest.into_iter().filter(|pid| all.insert(*pid) || signal == Signal::KILL).collect();
            kill_all(&new, signal);
            std::thread::sleep(PAUSE);
        }
    }
    all.len()
}

/// Kills the children of this process until there are none, or many were killed. A process that forks and ends again
/// and again is over before a list of all processes is complete.
fn kill_children() {
    for _ in 0..MAX_ROUNDS {
        let list = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
        let children: Vec<Pid> = list.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect();
        kill_all(&children, Signal::KILL);
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        if children.is_empty() {
            return;
        }
    }
}

fn kill_all(pids: &[Pid], signal: Signal) {
    for pid in pids {
        // It may have ended, or belong to another user.
        let _ = kill_process(*pid, signal);
    }
}

/// The processes that descend from memtrace, less those of memtrace itself: its analysis runs in a process of its own.
fn programs(memtrace: Pid) -> Vec<Pid> {
    let program = |pid: Pid| std::fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero())).ok();
    let own = program(memtrace);
    descendants(memtrace).into_iter().filter(|pid| program(*pid) != own).collect()
}
