//! Ends a Jupyter kernel when the program that started it is gone.
//!
//! A kernel polls its parent and exits when that has ended, so that the crash of a Jupyter server leaves no kernels. Under
//! memtrace the kernel's parent is the launcher, so the launcher watches in its place. `JPY_PARENT_PID` names the parent.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, getppid, pidfd_open};

/// The variable with the pid of the program that started a kernel.
const VARIABLE: &str = "JPY_PARENT_PID";

/// Watches the parent until it is dropped.
#[derive(Debug)]
pub(crate) struct ParentWatch {
    _is_watching: Arc<()>,
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
        let is_watching = Arc::new(());
        let weak = Arc::downgrade(&is_watching);
        std::thread::Builder::new().name("parent watch".into()).spawn(move || wait_for_end(&parent, &weak)).ok()?;
        Some(ParentWatch { _is_watching: is_watching })
    }
}

fn wait_for_end(parent: &OwnedFd, is_watching: &Weak<()>) {
    loop {
        match poll(&mut [PollFd::new(parent, PollFlags::IN)], None) {
            Ok(_) => break,
            Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
    if is_watching.strong_count() > 0 {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM);
    }
}
