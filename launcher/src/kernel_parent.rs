//! Ends a Jupyter kernel when the program that started it is gone.
//!
//! A kernel polls its parent and exits when that has ended, so that the crash of a Jupyter server leaves no kernels.
//! Under memtrace the kernel's parent is the launcher, so the launcher watches in its place. `JPY_PARENT_PID` names the
//! parent.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, getpid, getppid, kill_process, pidfd_open};

/// The variable with the pid of the program that started a kernel.
const VARIABLE: &str = "JPY_PARENT_PID";

/// Watches the parent until it is dropped.
#[derive(Debug)]
pub(crate) struct ParentWatch {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl ParentWatch {
    /// Starts to watch if the launcher is a kernel's and its parent started it. Signals must be blocked already.
    ///
    /// When the parent ends, this process gets a SIGTERM, and passes it on as it does with any other.
    pub(crate) fn start() -> Option<ParentWatch> {
        let named = std::env::var(VARIABLE).ok()?.parse().ok().and_then(Pid::from_raw)?;
        let parent = pidfd_open(named, PidfdFlags::empty()).ok()?;
        // Another process may have had the pid. Check this after it was opened, when it cannot be reused.
        if getppid() != Some(named) {
            return None;
        }
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).ok()?);
        let stopped = Arc::clone(&stop);
        let watch = move || wait_for_end(&parent, &stopped);
        let thread = std::thread::Builder::new().name("parent watch".into()).spawn(watch).ok()?;
        Some(ParentWatch { stop, thread: Some(thread) })
    }
}

impl Drop for ParentWatch {
    fn drop(&mut self) {
        // If the write fails, the thread still waits, and must not be waited for.
        if rustix::io::write(&*self.stop, &1u64.to_ne_bytes()).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn wait_for_end(parent: &OwnedFd, stopped: &OwnedFd) {
    let mut files = [PollFd::new(parent, PollFlags::IN), PollFd::new(stopped, PollFlags::IN)];
    while poll(&mut files, None) == Err(Errno::INTR) {}
    let [parent, stopped] = files;
    if !parent.revents().is_empty() && stopped.revents().is_empty() {
        let _ = kill_process(getpid(), Signal::TERM);
    }
}
