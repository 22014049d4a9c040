//! The task of the injector, and its result.

use std::os::fd::AsFd;

use anyhow::anyhow;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::message::WithHelp;

/// The call that loads the library and begins the recording.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    /// The path of the library.
    pub(super) library: &'a [u8],
    /// The options of the recording, the argument of the library's function.
    pub(super) options: &'a [u8],
}

/// The time for which the injection stopped threads, and its result.
#[derive(Serialize, Deserialize, Clone, Copy, Debug)]
pub(crate) struct Stopped {
    /// How long threads were stopped, one at a time, together in nanoseconds. `None` if Python itself has loaded the
    /// library, for which no thread is stopped.
    pub(crate) stopped_ns: Option<u64>,
    /// How long the thread that has loaded the library did not go on with the program, in nanoseconds.
    pub(crate) loading_ns: u64,
    /// The result of the library's function.
    pub(crate) result: i32,
}

/// Whether nobody waits for the injection any more: `cancel` is readable.
pub(super) fn is_cancelled(cancel: &impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(cancel, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// The error for a library that the process cannot load.
pub(super) fn not_loaded(pid: u32, why: &str) -> anyhow::Error {
    anyhow!(WithHelp::new(
        format!("cannot load the library into process {pid}: {why}"),
        "start the program with: memtrace -- COMMAND"
    ))
}
