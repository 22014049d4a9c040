//! Work on what others have written, in a process of its own: the analysis of a run, ours or somebody else's.
//!
//! The readers bound what they can, but memory grows with live blocks and distinct stacks, and those are for the recorded program to
//! choose; a library that is cut short while its symbols are read ends its reader by SIGBUS. In a process of its own neither takes
//! the launcher along: the command's exit status is passed on, and somebody says what happened. The process may take half of the
//! memory there is, and should the system run out of it all the same, it is the one to go.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// No less than this is allowed, whatever the machine has.
const LEAST_MEMORY: u64 = 512 << 20;
/// The exit code of work that panicked, as of a Rust program.
const PANICKED: u8 = 101;

/// Does `work` in a child process and gives the exit code it returns. The error says, in words, what ended it before.
pub(crate) fn run(work: impl FnOnce() -> u8) -> Result<u8, String> {
    let memory = allowed_memory();
    // SAFETY: plain calls without arguments.
    let (parent, child) = unsafe { (libc::getpid(), libc::fork()) };
    match child {
        // No process to be had: then here.
        -1 => Ok(work()),
        0 => {
            confine(memory, parent);
            let code = catch_unwind(AssertUnwindSafe(work)).unwrap_or(PANICKED);
            // SAFETY: this process is a copy: what its parent would do at exit is not its business. Everything is written through.
            unsafe { libc::_exit(code.into()) }
        }
        child => wait(child, memory),
    }
}

/// Half of the machine's memory, or of what the innermost cgroup allows.
fn allowed_memory() -> u64 {
    // SAFETY: plain calls.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let all = pages.max(0) as u64 * size.max(0) as u64;
    let cgroup = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|t| t.trim().parse::<u64>().ok());
    (all.min(cgroup.unwrap_or(all)) / 2).max(LEAST_MEMORY)
}

/// For the child: limits, and an end when the parent ends.
fn confine(memory: u64, parent: libc::pid_t) {
    let data = libc::rlimit { rlim_cur: memory, rlim_max: memory };
    let core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: valid limits and plain calls. What is refused leaves things as they are, which will do.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
        if libc::getppid() != parent {
            libc::_exit(PANICKED.into());
        }
        libc::setrlimit(libc::RLIMIT_DATA, &data);
        libc::setrlimit(libc::RLIMIT_CORE, &core);
        // Nothing that is read is a program.
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    }
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
}

fn wait(child: libc::pid_t, memory: u64) -> Result<u8, String> {
    let mut status = 0;
    // SAFETY: our own child, and a place for its status.
    while unsafe { libc::waitpid(child, &mut status, 0) } < 0 {
        let e = std::io::Error::last_os_error();
        if e.kind() != std::io::ErrorKind::Interrupted {
            return Err(format!("cannot be waited for: {e}"));
        }
    }
    if libc::WIFEXITED(status) {
        return Ok(libc::WEXITSTATUS(status) as u8);
    }
    Err(match libc::WTERMSIG(status) {
        libc::SIGABRT => format!("needed more than {} of memory, which is what it may have here", size(memory)),
        libc::SIGBUS => "came upon a file that was cut short under it".to_owned(),
        libc::SIGKILL => "was killed, as when memory runs out".to_owned(),
        signal => format!("was ended by signal {signal}"),
    })
}

fn size(bytes: u64) -> String {
    memtrace_analysis::report::size_text(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_comes_back() {
        assert_eq!(run(|| 7), Ok(7));
    }

    #[test]
    fn nothing_takes_us_along() {
        assert!(run(|| std::process::abort()).unwrap_err().contains("memory"));
        // SAFETY: ends the child, as asked.
        let killed = run(|| unsafe { libc::kill(libc::getpid(), libc::SIGKILL) } as u8);
        assert!(killed.unwrap_err().contains("killed"));
        // Without the hook: it takes locks that another test, panicking now, may have held at the fork.
        assert_eq!(run(|| std::panic::resume_unwind(Box::new("on purpose"))), Ok(PANICKED));
    }
}
