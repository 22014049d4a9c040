//! The errors of reading a snapshot.

use std::io;

use memtrace_trace::file::Exceeded;

/// Why reading ended before the snapshot did.
#[derive(Debug)]
pub(super) enum ReadError {
    /// The file ends.
    EndOfFile,
    /// The gzip stream is damaged.
    DamagedGzip,
    /// The operating system reported an error.
    Io(io::Error),
    /// The content is invalid. Says what is wrong.
    Invalid(String),
    /// The file needs more memory or work than its size allows.
    Exceeded(Exceeded),
}

impl From<Exceeded> for ReadError {
    fn from(exceeded: Exceeded) -> ReadError {
        ReadError::Exceeded(exceeded)
    }
}
