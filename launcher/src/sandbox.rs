//! A sandboxed worker: runs work on untrusted input, such as the analysis of a recorded run, in a child process.
//!
//! The readers bound what they can. But memory grows with the live blocks and distinct stacks, and the recorded program
//! determines both. A library that is truncated while its symbols are read ends its reader with SIGBUS. In a child
//! process neither ends the launcher. The launcher still passes on the command's exit status and reports what happened.
//! The child may use half of the memory. If the system runs out of memory nevertheless, the kernel kills the child
//! first.

use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use memtrace_trace::named;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions, getpid, getppid, getrlimit, kill_process, pidfd_open,
    set_parent_process_death_signal, setrlimit, waitpid,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::bounded_read::read_until;
use crate::message::WithHelp;

/// The memory that the child may use at least, in bytes, on any machine.
const MIN_MEMORY: u64 = 512 << 20;
/// The longest result of [`call`], in bytes.
const MAX_RESULT: usize = 1 << 20;
/// The exit code of work that panicked, the same as of a Rust program.
const PANIC_EXIT_CODE: u8 = 101;

/// Runs `work` in a child process and returns its exit code.
///
/// The error says what ended the child early. Without a child process, `work` runs in this process.
pub(crate) fn run(work: impl FnOnce() -> u8) -> anyhow::Result<u8> {
    match Worker::start(work) {
        Ok(worker) => worker.wait(),
        // No process could be created, so run the work here.
        Err((work, _)) => Ok(work()),
    }
}

/// Runs `work` in a child process for this long at most, and returns its result.
///
/// The error says what ended the child early. This process must have no other threads.
pub(crate) fn call<T: Serialize + DeserializeOwned>(limit: Duration, work: impl FnOnce() -> T) -> anyhow::Result<T> {
    let end = Instant::now() + limit;
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).context("cannot make a pipe")?;
    let send = || {
        let result = serde_json::to_vec(&work()).ok();
        result.and_then(|result| File::from(writer).write_all(&result).ok()).map_or(PANIC_EXIT_CODE, |()| 0)
    };
    let worker = Worker::start(send).map_err(|(_, e)| anyhow!(e).context("cannot start a worker process"))?;
    let read = read_until(File::from(reader), end, MAX_RESULT);
    match (read, worker.wait_for(end.saturating_duration_since(Instant::now()))?) {
        (Ok(result), 0) => serde_json::from_slice(&result).context("the worker process gave no result"),
        (Err(e), _) => Err(anyhow!(e).context("the worker process gave no result")),
        (Ok(_), code) => bail!("the worker process ended with exit code {code}"),
    }
}

/// A child process that works while this process does something else.
#[derive(Debug)]
pub(crate) struct Worker {
    pid: Pid,
    memory: u64,
}

impl Worker {
    /// Starts `work` in a child process. The error has the work and the reason. This process must have no other
    /// threads.
    pub(crate) fn start<W: FnOnce() -> u8>(work: W) -> Result<Worker, (W, std::io::Error)> {
        let memory = memory_limit();
        let parent = getpid();
        // SAFETY: `fork` takes no arguments and accesses no memory of ours.
        match unsafe { libc::fork() } {
            0 => {
                restrict(memory, parent);
                let code = catch_unwind(AssertUnwindSafe(work)).unwrap_or(PANIC_EXIT_CODE);
                // SAFETY: `_exit` takes an integer and does not return. The exit handlers of the copied parent must not
                // run here, and all output is already written.
                unsafe { libc::_exit(code.into()) }
            }
            child => match Pid::from_raw(child).filter(|_| child > 0) {
                Some(pid) => Ok(Worker { pid, memory }),
                None => Err((work, std::io::Error::last_os_error())),
            },
        }
    }

    /// Waits for the end of the work and returns its exit code. The error says what ended the child early.
    pub(crate) fn wait(self) -> anyhow::Result<u8> {
        wait(self.pid, self.memory)
    }

    /// [`Self::wait`] for this long at most. Then the child is ended.
    pub(crate) fn wait_for(self, limit: Duration) -> anyhow::Result<u8> {
        // Without such a descriptor (before Linux 5.3) there is no limit.
        if let Ok(child) = pidfd_open(self.pid, PidfdFlags::empty()) {
            let end = Instant::now() + limit;
            loop {
                let left = end.saturating_duration_since(Instant::now());
                let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
                match poll(&mut [PollFd::new(&child, PollFlags::IN)], Some(&left)) {
                    Ok(0) => {
                        self.kill();
                        bail!("the worker process took longer than {} s", limit.as_secs());
                    }
                    Err(rustix::io::Errno::INTR) => {}
                    Ok(_) | Err(_) => break,
                }
            }
        }
        self.wait()
    }

    /// Ends the child.
    pub(crate) fn kill(self) {
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = self.wait();
    }
}

/// Half of the machine's memory, or of the tightest limit of the control group and its parents if that is less, in
/// bytes.
fn memory_limit() -> u64 {
    let all = crate::host::total_memory();
    let group = crate::host::group_memory().map_or(all, |(limit, _)| limit);
    (all.min(group) / 2).max(MIN_MEMORY)
}

/// This program once more, under another name, for work on untrusted input in the background. It must begin with
/// [`restrict_background_process`].
pub(crate) fn background_process(name: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    // A key press that ends the recorded command does not end this process.
    command.arg0(name).env_clear().process_group(0);
    command
}

named! {
    /// The scheduling priority of a [`background_process`].
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum Priority {
        /// The programs have precedence. On a machine whose cores are all busy, the process hardly runs.
        Lowest => "lowest",
        /// That of the launcher.
        Normal => "normal",
    }
}

/// Limits this process, a [`background_process`], as a worker is limited.
pub(crate) fn restrict_background_process(priority: Priority) {
    if let Some(parent) = getppid() {
        restrict(memory_limit(), parent);
    }
    if priority == Priority::Lowest {
        // A refusal changes nothing else.
        let _ = rustix::process::setpriority_process(None, 19);
    }
}

/// Sets the limits of the child, and makes it end when the parent ends.
fn restrict(memory: u64, parent: Pid) {
    // A call that is refused leaves the old state, which is acceptable.
    let _ = set_parent_process_death_signal(Some(Signal::TERM));
    if getppid() != Some(parent) {
        // SAFETY: `_exit` takes an integer and does not return. The parent has ended, so nobody needs the work.
        unsafe { libc::_exit(PANIC_EXIT_CODE.into()) }
    }
    let limit = |bytes| Rlimit { current: Some(bytes), maximum: Some(bytes) };
    let _ = setrlimit(Resource::Data, limit(memory));
    let _ = setrlimit(Resource::Core, limit(0));
    // Each trace of a run stays open, and a run can have thousands.
    let open_files = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: open_files, maximum: open_files });
    // Rust's handler turns a stack overflow into SIGABRT, which is also how a failed allocation ends a process.
    // SAFETY: `SIG_DFL` installs no handler.
    unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
    // The child executes no other program, so it needs no new privileges.
    let _ = rustix::thread::set_no_new_privs(true);
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
}

fn wait(child: Pid, memory: u64) -> anyhow::Result<u8> {
    let status = match rustix::io::retry_on_intr(|| waitpid(Some(child), WaitOptions::empty())) {
        Ok(Some((_, status))) => status,
        Ok(None) => return Err(anyhow!("cannot wait for the worker process")),
        Err(e) => return Err(anyhow!("cannot wait for the worker process: {}", std::io::Error::from(e))),
    };
    if let Some(code) = status.exit_status() {
        return Ok(code as u8);
    }
    const MORE_MEMORY: &str = "read the run on a machine with more memory";
    Err(match status.terminating_signal().unwrap_or(0) {
        libc::SIGABRT => {
            let limit = memory_text(memory);
            WithHelp::new(format!("the worker process exceeded its memory limit of {limit}"), MORE_MEMORY).into()
        }
        libc::SIGSEGV => WithHelp::new(
            "the worker process crashed (SIGSEGV): a stack overflow, or a defect of memtrace",
            "report this with the file that was read",
        )
        .into(),
        libc::SIGBUS => anyhow!("a file was truncated while the worker process read it"),
        libc::SIGKILL => {
            WithHelp::new("the worker process was killed; the system may have run out of memory", MORE_MEMORY).into()
        }
        signal => anyhow!("signal {signal} ended the worker process"),
    })
}

fn memory_text(bytes: u64) -> String {
    memtrace_analysis::report::size_text(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(unconditional_recursion, reason = "it overflows the stack")]
    fn overflow_stack(depth: u64) -> u64 {
        std::hint::black_box([depth; 512])[0] + overflow_stack(std::hint::black_box(depth + 1))
    }

    #[test]
    fn the_exit_code_is_returned() {
        assert_eq!(run(|| 7).unwrap(), 7);
    }

    #[test]
    fn results_are_returned() {
        let limit = Duration::from_secs(600);
        let result = call(limit, || (getpid().as_raw_nonzero().get(), "x".repeat(500_000))).unwrap();
        assert!(result.0 != getpid().as_raw_nonzero().get() && result.1.len() == 500_000);
        let error = |result: anyhow::Result<String>| format!("{:#}", result.unwrap_err());
        assert!(error(call(limit, || "x".repeat(MAX_RESULT))).contains("gave no result"));
        assert!(error(call(limit, || std::process::abort())).contains("memory"));
        let endless = || loop {
            std::thread::sleep(Duration::from_secs(600));
        };
        let late = call::<String>(Duration::from_millis(20), endless);
        assert!(error(late).contains("the worker process took longer"), "it is ended");
    }

    #[test]
    fn the_end_of_the_worker_does_not_end_the_launcher() {
        assert!(run(|| std::process::abort()).unwrap_err().to_string().contains("memory"));
        let killed = run(|| rustix::process::kill_process(getpid(), Signal::KILL).is_err().into());
        assert!(killed.unwrap_err().to_string().contains("killed"));
        let overflow = run(|| u8::from(overflow_stack(0) == 1)).unwrap_err().to_string();
        assert!(overflow.contains("stack overflow") && !overflow.contains("memory"), "{overflow}");
        // `resume_unwind` skips the panic hook. The hook takes locks that another panicking test may have held at the
        // fork.
        assert_eq!(run(|| std::panic::resume_unwind(Box::new("on purpose"))).unwrap(), PANIC_EXIT_CODE);
    }
}
