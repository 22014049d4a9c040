//! The command as a child process. It runs in the launcher's process group, session and terminal, with the inherited
//! state unchanged.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::inherited::InheritedState;

/// The command, running or ended and not yet collected. Its pid is not reused before [`Child::collect`].
#[derive(Debug)]
pub(crate) struct Child {
    pid: libc::pid_t,
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
    /// Starts `command` (name and arguments) through PATH, as execvp does. The error is that of exec.
    pub(crate) fn spawn(command: &[OsString], state: InheritedState) -> io::Result<Child> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        command.args(arguments);
        // SAFETY: `restore` makes only async-signal-safe calls, as `pre_exec` requires in the child of a process with
        // threads.
        unsafe { command.pre_exec(move || state.restore()) };
        let child = command.spawn()?;
        // Dropping the handle of the standard library neither waits for the child nor kills it.
        Ok(Child { pid: child.id() as libc::pid_t })
    }

    /// The process id.
    pub(crate) fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// The `wait(2)` status word of a child that has ended. The child stays uncollected. `None` while it runs.
    pub(crate) fn exit_status(&self) -> Option<i32> {
        self.wait(libc::WEXITED | libc::WNOWAIT | libc::WNOHANG).map(|info| wait_status(&info))
    }

    /// The next stop or continuation. `None` when there is none.
    pub(crate) fn change(&self) -> Option<Change> {
        let info = self.wait(libc::WSTOPPED | libc::WCONTINUED | libc::WNOHANG)?;
        // SAFETY: `waitid` filled `info` in, as `wait` checks through `si_pid`. A SIGCHLD siginfo has a status.
        let status = unsafe { info.si_status() };
        Some(if info.si_code == libc::CLD_CONTINUED { Change::Continued } else { Change::Stopped(status) })
    }

    /// Collects the ended child. Its pid may be reused afterwards.
    pub(crate) fn collect(self) {
        self.wait(libc::WEXITED | libc::WNOHANG);
    }

    /// Sends the child a signal. `value` is that of a signal sent with `sigqueue`.
    pub(crate) fn signal(&self, signal: libc::c_int, value: Option<libc::sigval>) {
        // SAFETY: both calls take only plain values. The child is not collected before `collect` consumes `self`, so
        // its pid was not reused. A signal to a zombie has no effect.
        unsafe {
            match value {
                Some(value) => libc::sigqueue(self.pid, signal, value),
                None => libc::kill(self.pid, signal),
            };
        }
    }

    fn wait(&self, options: libc::c_int) -> Option<libc::siginfo_t> {
        // SAFETY: `siginfo_t` is plain data for which all zeros is valid, and `info` is valid for writes. `si_pid`
        // stays 0 when `waitid` reports nothing.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let result = libc::waitid(libc::P_PID, self.pid as libc::id_t, &mut info, options);
            (result == 0 && info.si_pid() != 0).then_some(info)
        }
    }
}

/// The status word of `wait(2)` from the result of `waitid`.
pub(crate) fn wait_status(info: &libc::siginfo_t) -> i32 {
    // SAFETY: the caller passes an `info` that a successful `waitid` filled in, so it is a SIGCHLD siginfo with a
    // status.
    let status = unsafe { info.si_status() };
    match info.si_code {
        libc::CLD_EXITED => (status & 0xff) << 8,
        libc::CLD_DUMPED => status | 0x80,
        _ => status,
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
