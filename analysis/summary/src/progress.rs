//! Progress of long work.

/// The progress of the work, for a progress line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress<'a> {
    /// The current task, for example `reading rank 3`.
    pub what: &'a str,
    /// Events processed; bytes while a snapshot is being read.
    pub done: u64,
    /// The total number of events or bytes.
    pub total: u64,
}
