//! Loads the library into a process that runs already: through Python 3.14 and newer ([`remote`]), else as debuggers do
//! (ptrace, [`inject()`]).
//!
//! [`Injection::examine`] looks at the process, [`Injection::start`] starts the injector, and [`Injection::begin`] lets
//! it begin. The injector is a child process, because ptrace belongs to one thread, and so that the end of the launcher
//! does not end it in the middle. At no time does the traced process need it: its end, at any moment, leaves nothing
//! behind.

mod arch;
mod inject;
mod loaded_file;
mod loader_locks;
mod rehearsal;
mod remote;
mod request;
mod safe_point;
mod safe_stack;
mod signal_frame;
mod traced_process;
mod tracee;
mod unwind;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use anyhow::{Context, anyhow};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, waitpid};
use serde::{Deserialize, Serialize};

use self::inject::inject;
use crate::message::{WithHelp, help_of};

use self::request::Request;
pub(crate) use self::request::Stopped;
pub(crate) use self::traced_process::TracedProcess;

/// The longest answer of the injector, in bytes.
const MAX_ANSWER: u64 = 64 * 1024;

/// The injector's answer.
#[derive(Serialize, Deserialize, Debug)]
enum Answer {
    Done(Stopped),
    Failed { text: String, help: Option<String> },
}

/// An injector that waits for the beginning.
#[derive(Debug)]
pub(crate) struct Injection {
    /// Its end cancels the injection. `None` once that is wanted.
    begin: Option<File>,
    answer: File,
    child: Option<Pid>,
}

impl Injection {
    /// Checks that a process can be recorded, and finds its functions.
    ///
    /// The error has the reason, and the fix if there is one.
    pub(crate) fn examine(pid: u32, library: &Path) -> anyhow::Result<TracedProcess> {
        TracedProcess::examine(pid, library)
    }

    /// Starts an injector. This process must have no other threads. `options` is the argument of the library's
    /// function.
    pub(crate) fn start(process: TracedProcess, library: &Path, options: &str) -> anyhow::Result<Injection> {
        let pipe = || pipe_with(PipeFlags::CLOEXEC).context("cannot create a pipe");
        let ((begin_read, begin_write), (answer_read, answer_write)) = (pipe()?, pipe()?);
        // SAFETY: `fork` takes no arguments and accesses no memory of ours.
        match unsafe { libc::fork() } {
            0 => {
                drop((begin_write, answer_read));
                let request = Request { library: library.as_os_str().as_bytes(), options: options.as_bytes() };
                let work = || serve(&process, request, File::from(begin_read), File::from(answer_write));
                let is_done = catch_unwind(AssertUnwindSafe(work)).is_ok();
                // SAFETY: `_exit` takes an integer and does not return. The exit handlers of the copied parent must not
                // run here.
                unsafe { libc::_exit(i32::from(!is_done)) }
            }
            child if child > 0 => {
                let child = Pid::from_raw(child);
                Ok(Injection { begin: Some(begin_write.into()), answer: answer_read.into(), child })
            }
            _ => Err(std::io::Error::last_os_error()).context("cannot start a process"),
        }
    }

    /// Lets the injector begin.
    pub(crate) fn begin(&mut self) -> anyhow::Result<()> {
        let mut begin = self.begin.as_ref().context("the injector has ended")?;
        begin.write_all(&[1]).context("the injector has ended")
    }

    /// Waits for the injector's result. It ends early, and the process goes on as before, if this value is dropped.
    pub(crate) fn finish(&mut self) -> anyhow::Result<Stopped> {
        let mut text = Vec::new();
        (&self.answer).take(MAX_ANSWER).read_to_end(&mut text).context("cannot read the injector's answer")?;
        match serde_json::from_slice(&text).context("the injector has ended")? {
            Answer::Done(stopped) => Ok(stopped),
            Answer::Failed { text, help: None } => Err(anyhow!(text)),
            Answer::Failed { text, help: Some(help) } => Err(anyhow!(WithHelp::new(text, help))),
        }
    }
}

impl Drop for Injection {
    /// Waits until the process goes on without the injector.
    fn drop(&mut self) {
        self.begin = None;
        if let Some(child) = self.child {
            let _ = waitpid(Some(child), WaitOptions::empty());
        }
    }
}

impl AsFd for Injection {
    /// The descriptor becomes readable when the result is there.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.answer.as_fd()
    }
}

/// The work of the injector.
fn serve(process: &TracedProcess, request: Request<'_>, mut begin: File, mut answer: File) {
    // Neither a signal to the launcher's group nor its terminal ends this process.
    let _ = rustix::process::setsid();
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` initializes the set before its use. No handler is installed.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
        // It would not come if it were ignored.
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
    }
    if begin.read_exact(&mut [0]).is_err() {
        return;
    }
    let loaded = match remote::load(process, request, &begin) {
        Ok(None) => inject(process, request, &begin),
        Ok(Some(stopped)) => Ok(stopped),
        Err(error) => Err(error),
    };
    let result = match loaded {
        Ok(stopped) => Answer::Done(stopped),
        Err(error) => Answer::Failed { text: format!("{error:#}"), help: help_of(&error) },
    };
    let _ = serde_json::to_writer(&mut answer, &result);
}
