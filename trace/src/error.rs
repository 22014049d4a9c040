//! Errors of traces and segments. The reading commands add what the user can do.

use std::fmt;

use crate::version::Version;

/// An error of this crate. Each message includes its cause, so `source()` returns nothing.
#[derive(Debug)]
pub enum Error {
    /// The file could not be read or written.
    Io {
        /// The attempted operation, with the path.
        what: String,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The file does not begin like a trace.
    NotATrace {
        /// The first bytes of the file.
        found: Vec<u8>,
    },
    /// A newer memtrace wrote the file.
    TooNew {
        /// The file's version.
        found: Version,
        /// The newest version this build reads.
        supported: Version,
    },
    /// The header is damaged, so nothing after it can be used.
    Header {
        /// The offset in the file, in bytes.
        offset: u64,
        /// The error.
        what: String,
    },
    /// Bytes that no memtrace writes.
    Malformed {
        /// The record or field.
        what: &'static str,
    },
}

// Implemented by hand: a derive macro would double the build time of the preloaded library.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { what, cause } => write!(f, "{what}: {cause}"),
            Error::NotATrace { found } => {
                write!(f, "not a memtrace trace ({})", beginning(found))
            }
            Error::TooNew { found, supported } => {
                write!(f, "trace format {found} is newer than this memtrace supports ({supported})")
            }
            Error::Header { offset, what } => write!(
                f,
                "the trace's header is damaged at byte {offset}: {what}; nothing can be recovered from this file"
            ),
            Error::Malformed { what } => write!(f, "malformed {what}"),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// Wraps an I/O error. `what` is the attempted operation.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let what = what.into();
        move |cause| Error::Io { what, cause }
    }
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Describes the beginning of a file for a message.
fn beginning(found: &[u8]) -> String {
    if found.is_empty() { "it is empty".to_owned() } else { format!("it begins with \"{}\"", found.escape_ascii()) }
}
