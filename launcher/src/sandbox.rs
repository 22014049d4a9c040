//! A sandboxed worker: runs work on untrusted input, such as the analysis of a recorded run, in a child process.
//!
//! The readers bound what they can. But memory grows with the live blocks and distinct stacks, and the recorded program
//! determines both. A library that is truncated while its symbols are read ends its reader with SIGBUS. In a child
//! process neither ends the launcher. The launcher still passes on the command's exit status and reports what happened.
//! The child may use half of the memory. If the system runs out of memory nevertheless, the kernel kills the child
//! first.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::anyhow;

use crate::message::WithHelp;

/// The memory that the child may use at least, in bytes, on any machine.
const MIN_MEMORY: u64 = 512 << 20;
/// The exit code of work that panicked, the same as of a Rust program.
const PANIC_EXIT_CODE: u8 = 101;

/// Runs `work` in a child process and returns its exit code.
///
/// The error says what ended the child early. Without a child process, `work` runs in this process.
pub(crate) fn run(work: impl FnOnce() -> u8) -> anyhow::Result<u8> {
    let memory = memory_limit();
    // SAFETY: `getpid` and `fork` take no arguments and access no memory of ours.
    let (parent, child) = unsafe { (libc::getpid(), libc::fork()) };
    match child {
        // No process could be created, so run the work here.
        -1 => Ok(work()),
        0 => {
            restrict(memory, parent);
            let code = catch_unwind(AssertUnwindSafe(work)).unwrap_or(PANIC_EXIT_CODE);
            // SAFETY: `_exit` takes an integer and does not return. The exit handlers of the copied parent must not run
            // here, and all output is already written.
            unsafe { libc::_exit(code.into()) }
        }
        child => wait(child, memory),
    }
}

/// Half of the machine's memory, or of the limit of the cgroup at `/sys/fs/cgroup` if that is less, in bytes.
///
/// In a container with a cgroup namespace that is the container's cgroup.
fn memory_limit() -> u64 {
    // SAFETY: `sysconf` takes an integer and accesses no memory of ours.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let all = pages.max(0) as u64 * size.max(0) as u64;
    let cgroup = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|t| t.trim().parse::<u64>().ok());
    (all.min(cgroup.unwrap_or(all)) / 2).max(MIN_MEMORY)
}

/// Sets the limits of the child, and makes it end when the parent ends.
fn restrict(memory: u64, parent: libc::pid_t) {
    let data = libc::rlimit { rlim_cur: memory, rlim_max: memory };
    let core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `data` and `core` are valid `rlimit` values on this stack frame. The other calls take only integers. A
    // call that is refused leaves the old state, which is acceptable.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
        if libc::getppid() != parent {
            libc::_exit(PANIC_EXIT_CODE.into());
        }
        libc::setrlimit(libc::RLIMIT_DATA, &data);
        libc::setrlimit(libc::RLIMIT_CORE, &core);
        // The child executes no other program, so it needs no new privileges.
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    }
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
}

fn wait(child: libc::pid_t, memory: u64) -> anyhow::Result<u8> {
    let mut status = 0;
    // SAFETY: `child` is this process's own child, and `status` is valid for writes.
    while unsafe { libc::waitpid(child, &mut status, 0) } < 0 {
        let e = std::io::Error::last_os_error();
        if e.kind() != std::io::ErrorKind::Interrupted {
            return Err(anyhow!("cannot wait for the worker process: {e}"));
        }
    }
    if libc::WIFEXITED(status) {
        return Ok(libc::WEXITSTATUS(status) as u8);
    }
    const MORE_MEMORY: &str = "read the run on a machine with more memory";
    Err(match libc::WTERMSIG(status) {
        libc::SIGABRT => {
            let limit = memory_text(memory);
            WithHelp::new(format!("the worker process exceeded its memory limit of {limit}"), MORE_MEMORY).into()
        }
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

    #[test]
    fn the_exit_code_is_returned() {
        assert_eq!(run(|| 7).unwrap(), 7);
    }

    #[test]
    fn the_end_of_the_worker_does_not_end_the_launcher() {
        assert!(run(|| std::process::abort()).unwrap_err().to_string().contains("memory"));
        // SAFETY: `getpid` and `kill` take only integers. The signal ends only the child that runs this closure, which
        // is intended.
        let killed = run(|| unsafe { libc::kill(libc::getpid(), libc::SIGKILL) } as u8);
        assert!(killed.unwrap_err().to_string().contains("killed"));
        // `resume_unwind` skips the panic hook. The hook takes locks that another panicking test may have held at the
        // fork.
        assert_eq!(run(|| std::panic::resume_unwind(Box::new("on purpose"))).unwrap(), PANIC_EXIT_CODE);
    }
}
