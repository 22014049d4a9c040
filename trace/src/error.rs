//! What can be wrong with a trace or a segment. Every message says what to do next.

use std::fmt;

use crate::version::Version;

/// An error of this crate. A message says everything, its cause included, so there is no `source()` to print after it.
#[derive(Debug)]
pub enum Error {
    /// The file could not be read or written.
    Io {
        /// What was being done, with the path.
        what: String,
        /// The system's answer.
        cause: std::io::Error,
    },
    /// The file does not begin as a trace does.
    NotATrace {
        /// The first bytes.
        found: Vec<u8>,
    },
    /// A newer memtrace wrote the file.
    TooNew {
        /// The file's version.
        found: Version,
        /// The newest version this build reads.
        supported: Version,
    },
    /// Nothing after the first bytes can be used.
    Header {
        /// Where.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// Bytes that no encoder of ours writes.
    Malformed {
        /// Which record or field.
        what: &'static str,
    },
}

// Written out: a derive macro would make the preloaded library's build twice as long.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { what, cause } => write!(f, "{what}: {cause}"),
            Error::NotATrace { found } => {
                write!(f, "not a memtrace trace ({}); give a .mtr file or a run folder", beginning(found))
            }
            Error::TooNew { found, supported } => write!(
                f,
                "trace format {found} is newer than this memtrace reads ({supported}); read it with a memtrace at least as new as the one that wrote it"
            ),
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
    /// An I/O error with what was being done.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let what = what.into();
        move |cause| Error::Io { what, cause }
    }
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a file begins with, for people.
fn beginning(found: &[u8]) -> String {
    if found.is_empty() { "it is empty".to_owned() } else { format!("it begins with \"{}\"", found.escape_ascii()) }
}
