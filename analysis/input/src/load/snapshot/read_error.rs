//! The errors of reading a snapshot.

use std::io;

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
    /// The file needs more memory than its size allows.
    MemoryLimit,
}
