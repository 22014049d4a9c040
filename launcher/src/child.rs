//! The command as a child process. It runs in the launcher's process group, session and terminal, with the inherited
//! state unchanged.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus, waitid};

use crate::inherited::InheritedState;

/// The command, running or ended and not yet collected. Its pid is not reused before [`Child::collect`].
#[derive(Debug)]
pub(crate) struct Child {
    pid: Pid,
}

/// A change of the child's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// This signal stopped the child.
    Stopped(libc::c_int),
    /// The child continued.
    Continued,
}

impl Child {
    /// Starts `command` (name and arguments) through PATH, as execvp does. The error is that of exec. `output` is its
    /// standard output and error, else those of this process.
    pub(crate) fn spawn(command: &[OsString], state: InheritedState, output: Option<[Stdio; 2]>) -> io::Result<Child> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        command.args(arguments);
        if let Some([stdout, stderr]) = output {
            command.stdout(stdout).stderr(stderr);
        }
        // SAFETY: `restore` makes only async-signal-safe calls, as `pre_exec` requires in the child of a process with
        // threads.
        unsafe { command.pre_exec(move || state.restore()) };
        let child = command.spawn()?;
        // Dropping the handle of the standard library neither waits for the child nor kills it.
        Ok(Child { pid: Pid::from_child(&child) })
    }

    /// The process id.
    pub(crate) fn pid(&self) -> libc::pid_t {
        self.pid.as_raw_nonzero().get()
    }

    /// The `wait(2)` status word of a child that has ended. The child stays uncollected. `None` while it runs.
    pub(crate) fn exit_status(&self) -> Option<i32> {
        self.wait(WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).map(|status| wait_status(&status))
    }

    /// The next stop or continuation. `None` when there is none.
    pub(crate) fn change(&self) -> Option<Change> {
        let status = self.wait(WaitIdOptions::STOPPED | WaitIdOptions::CONTINUED)?;
        if status.continued() {
            return Some(Change::Continued);
        }
        // A child under a debugger is trapped instead of stopped.
        status.stopping_signal().or_else(|| status.trapping_signal()).map(Change::Stopped)
    }

    /// Collects the ended child. Its pid may be reused afterwards.
    pub(crate) fn collect(self) {
        self.wait(WaitIdOptions::EXITED);
    }

    /// Sends the child a signal. `value` is that of a signal sent with `sigqueue`.
    pub(crate) fn signal(&self, signal: libc::c_int, value: Option<libc::sigval>) {
        // rustix sends neither real-time signals nor values.
        // SAFETY: both calls take only plain values. The child is not collected before `collect` consumes `self`, so
        // its pid was not reused. A signal to a zombie has no effect.
        unsafe {
            match value {
                Some(value) => libc::sigqueue(self.pid(), signal, value),
                None => libc::kill(self.pid(), signal),
            };
        }
    }

    /// The kernel's report now. `None` when that is nothing.
    fn wait(&self, options: WaitIdOptions) -> Option<WaitIdStatus> {
        waitid(WaitId::Pid(self.pid), options | WaitIdOptions::NOHANG).ok().flatten()
    }
}

/// The status word of `wait(2)` for a process that has ended, from the result of `waitid`.
pub(crate) fn wait_status(status: &WaitIdStatus) -> i32 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => (code & 0xff) << 8,
        (None, Some(signal)) if status.dumped() => signal | 0x80,
        (None, signal) => signal.unwrap_or(0),
    }
}

/// The exit code for a status word of `wait(2)`: the command's own, or 128 + n for signal n.
pub(crate) fn exit_code(wait_status: i32) -> u8 {
    if libc::WIFSIGNALED(wait_status) {
        128u8.wrapping_add(libc::WTERMSIG(wait_status) as u8)
    } else {
        libc::WEXITSTATUS(wait_status) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_follow_the_shell() {
        assert_eq!(exit_code(3 << 8), 3);
        assert_eq!(exit_code(libc::SIGKILL), 137);
        assert_eq!(exit_code(libc::SIGSEGV | 0x80), 139);
    }
}
