//! Moves the records of the traced processes into trace files while the processes run.
//!
//! There are two threads. The *drain* thread ([`drain_loop`]) accepts processes, empties their rings and orders the
//! events. It never accesses a disk. The *writer* thread ([`writer`]) encodes, compresses and writes. A bounded queue
//! connects them. When a disk stalls, the drain thread leaves the events in the rings. The traced processes then wait,
//! or drop events and count them.
//!
//! A segment is untrusted: the process that writes it may be buggy or hostile. It can damage only its own trace.
//! Positions, lengths and ids are checked, memory and definitions are bounded, and no content of a segment names a
//! file.

mod acceptor;
pub(crate) mod drain_loop;
mod exit_status;
mod final_passes;
mod flushes;
mod inquiries;
mod limits;
pub(crate) mod merge;
mod output;
mod pass_result;
mod process;
pub(crate) mod refusal;
mod rings;
mod rotation;
pub(crate) mod rotation_worker;
mod threads;
mod trace_files;
mod truncated;
mod window_limit;
pub(crate) mod writer;

use memtrace_analysis::load::ManifestNotice;
use memtrace_trace::counters::CounterValues;
use serde_json::Value;

use self::refusal::RefusalReason;

/// The events of a process that arrived, and those that did not.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReceivedCounts {
    /// The number of events sent to the writer.
    pub(crate) events: u64,
    /// The number of events that never arrived.
    pub(crate) lost: u64,
    /// The number of events that arrived late and are out of order in the file.
    pub(crate) late: u64,
    /// The number of malformed records in the rings. The memtrace library writes none.
    pub(crate) corrupt: u64,
    /// The number of definitions that were refused because they were malformed or over the budget.
    pub(crate) definitions_refused: u64,
}

/// The results of one recorded process image, complete when its file is finished.
#[derive(Debug)]
pub(crate) struct Recorded {
    /// The kernel's process id in the launcher's pid namespace.
    pub(crate) pid: u32,
    /// The trace file's name inside the run folder.
    pub(crate) file: String,
    /// The trace's info object: command line, executable, environment of interest.
    pub(crate) info: Value,
    /// When the recording began, in nanoseconds since the Unix epoch.
    pub(crate) start_ns: u64,
    /// When the recording ended, in nanoseconds since the Unix epoch.
    pub(crate) end_ns: u64,
    /// The status word of `wait(2)`. `None` when it is unknown.
    pub(crate) wait_status: Option<i32>,
    /// Why the recording ended: `exited`, `replaced by exec`, `detached`, `still running`.
    pub(crate) reason: &'static str,
    /// The counts of its events.
    pub(crate) received: ReceivedCounts,
    /// The counters of the process itself.
    pub(crate) counters: CounterValues,
    /// The notices from parts of the recorder.
    pub(crate) notices: Vec<ManifestNotice>,
    /// The rank in a distributed job and the world size, as the process gave them to PyTorch.
    pub(crate) rank: Option<(u32, u32)>,
}

/// The result of one trace file.
#[derive(Debug)]
pub(crate) struct Written {
    /// The file's name inside the run folder.
    pub(crate) file: String,
    /// The number of bytes that reached the file.
    pub(crate) bytes: u64,
    /// The number of events that did not reach the file because writing failed.
    pub(crate) unwritten: u64,
    /// Why writing failed. `None` when it succeeded.
    pub(crate) error: Option<String>,
}

/// The results of both threads.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// One entry for each recorded process image, in the order in which they ended.
    pub(crate) recorded: Vec<Recorded>,
    /// One entry for each trace file.
    pub(crate) written: Vec<Written>,
    /// The number of requests that could not be served, by reason.
    pub(crate) refused: Vec<(RefusalReason, u64)>,
}
