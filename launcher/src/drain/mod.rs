//! Moves what the traced processes record into trace files, while they run.
//!
//! Two threads. The *drain* thread ([`pump`]) accepts processes, empties their rings and puts the events into order; it never
//! touches a disk. The *writer* thread ([`writer`]) encodes, compresses and writes. Between them is a queue with a bound: when a
//! disk stalls, the drain leaves the events in the rings, and the traced processes wait or count.
//!
//! Everything read from a segment was written by a process that may be buggy or hostile. The worst it can do is to spoil its
//! own trace: positions, lengths and ids are checked, memory and definitions are bounded, and nothing it says names a file.

mod cut;
mod door;
mod ending;
mod limits;
pub(crate) mod merge;
mod process;
pub(crate) mod pump;
mod rings;
mod threads;
pub(crate) mod writer;

use memtrace_trace::counters::CounterValues;
use serde::Serialize;
use serde_json::Value;

/// What is known about one recorded process image when its file is finished.
#[derive(Debug)]
pub(crate) struct Recorded {
    /// The kernel's process id, in the launcher's namespace.
    pub(crate) pid: u32,
    /// The trace file's name inside the run folder.
    pub(crate) file: String,
    /// The trace's info object: command line, executable, environment of interest.
    pub(crate) info: Value,
    /// When the recording began and ended, nanoseconds since the epoch.
    pub(crate) start_ns: u64,
    /// See `start_ns`.
    pub(crate) end_ns: u64,
    /// The status `wait(2)` gave, where it could be learned.
    pub(crate) wait_status: Option<i32>,
    /// Why the recording ended: `exited`, `replaced by exec`, `still running`.
    pub(crate) reason: &'static str,
    /// Events handed to the writer.
    pub(crate) events: u64,
    /// Events that never arrived.
    pub(crate) lost: u64,
    /// Events that came late and stand out of order.
    pub(crate) late: u64,
    /// Times a ring held what no producer of ours writes.
    pub(crate) corrupt: u64,
    /// Definitions refused, because malformed or beyond the bound.
    pub(crate) definitions_refused: u64,
    /// The process's own counters.
    pub(crate) counters: CounterValues,
    /// What parts of the recorder said.
    pub(crate) notices: Vec<Notice>,
    /// Its rank in a distributed job and the number of ranks, as it told PyTorch.
    pub(crate) rank: Option<(u32, u32)>,
}

/// What a part of the recorder said.
#[derive(Serialize, Debug)]
pub(crate) struct Notice {
    /// Which part, e.g. `torch.tracker`.
    pub(crate) topic: String,
    /// What about it.
    pub(crate) text: String,
    /// `works`, `off` or `remark`.
    pub(crate) verdict: &'static str,
}

/// What became of one trace file.
#[derive(Debug)]
pub(crate) struct Written {
    /// The file's name inside the run folder.
    pub(crate) file: String,
    /// Bytes that reached the file.
    pub(crate) bytes: u64,
    /// Events that did not reach the file, because writing failed.
    pub(crate) unwritten: u64,
    /// Why writing failed.
    pub(crate) error: Option<String>,
}

/// Everything the two threads leave behind.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// One entry a process image that recorded something, in order of their ends.
    pub(crate) recorded: Vec<Recorded>,
    /// One entry a trace file.
    pub(crate) written: Vec<Written>,
    /// Processes that asked and could not be served, by reason.
    pub(crate) refused: Vec<(&'static str, u64)>,
}
