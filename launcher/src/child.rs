//! The command as a child process: started in our process group, session and terminal, with everything as we got it.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::inherited::State;

/// The command, running or ended and not yet collected: its pid stays its own until [`Child::collect`].
#[derive(Debug)]
pub(crate) struct Child {
    pid: libc::pid_t,
}

/// What the child did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// It was stopped by this signal.
    Stopped(libc::c_int),
    /// It was continued.
    Continued,
}

impl Child {
    /// Starts `command` (name and arguments) through PATH, as execvp does. The error is exec's own.
    pub(crate) fn spawn(command: &[OsString], state: State) -> io::Result<Child> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        command.args(arguments);
        // SAFETY: `restore` makes async-signal-safe calls only.
        unsafe { command.pre_exec(move || state.restore()) };
        let child = command.spawn()?;
        // Dropping std's handle neither waits nor kills.
        Ok(Child { pid: child.id() as libc::pid_t })
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// The status of a child that has ended, as `wait(2)` gives it. It stays uncollected.
    pub(crate) fn ended(&self) -> Option<i32> {
        self.wait(libc::WEXITED | libc::WNOWAIT | libc::WNOHANG).map(|info| wait_status(&info))
    }

    /// The next stop or continuation.
    pub(crate) fn change(&self) -> Option<Change> {
        let info = self.wait(libc::WSTOPPED | libc::WCONTINUED | libc::WNOHANG)?;
        // SAFETY: a filled-in SIGCHLD siginfo carries a status.
        let status = unsafe { info.si_status() };
        Some(if info.si_code == libc::CLD_CONTINUED { Change::Continued } else { Change::Stopped(status) })
    }

    /// Lets the kernel forget an ended child.
    pub(crate) fn collect(self) {
        self.wait(libc::WEXITED | libc::WNOHANG);
    }

    /// Sends it a signal, with the value of a queued one.
    pub(crate) fn signal(&self, signal: libc::c_int, value: Option<libc::sigval>) {
        // SAFETY: the child has not been collected, so the pid is its own. A zombie does not mind.
        unsafe {
            match value {
                Some(value) => libc::sigqueue(self.pid, signal, value),
                None => libc::kill(self.pid, signal),
            };
        }
    }

    fn wait(&self, options: libc::c_int) -> Option<libc::siginfo_t> {
        // SAFETY: `info` is plain data that the call fills; si_pid stays 0 when there is nothing to tell.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let result = libc::waitid(libc::P_PID, self.pid as libc::id_t, &mut info, options);
            (result == 0 && info.si_pid() != 0).then_some(info)
        }
    }
}

/// The status word of `wait(2)` from waitid's answer.
pub(crate) fn wait_status(info: &libc::siginfo_t) -> i32 {
    // SAFETY: the caller got `info` from a waitid that said something.
    let status = unsafe { info.si_status() };
    match info.si_code {
        libc::CLD_EXITED => (status & 0xff) << 8,
        libc::CLD_DUMPED => status | 0x80,
        _ => status,
    }
}

/// The exit code that stands for a wait status: the command's own, or 128 + n for signal n.
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
    fn exit_codes() {
        assert_eq!(exit_code(3 << 8), 3);
        assert_eq!(exit_code(libc::SIGKILL), 137);
        assert_eq!(exit_code(libc::SIGSEGV | 0x80), 139);
    }
}
