//! What can be wrong with a trace or a segment. Every message says what to do next.

use crate::version::Version;

/// An error of this crate. A message says everything, its cause included, so there is no `source()` to print after it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read or written.
    #[error("{what}: {cause}")]
    Io {
        /// What was being done, with the path.
        what: String,
        /// The system's answer.
        cause: std::io::Error,
    },
    /// The file does not begin as a trace does.
    #[error("not a memtrace trace ({}); give a .mtr file or a run folder", beginning(found))]
    NotATrace {
        /// The first bytes.
        found: Vec<u8>,
    },
    /// A newer memtrace wrote the file.
    #[error(
        "trace format {found} is newer than this memtrace reads ({supported}); read it with a memtrace at least as new as the one that wrote it"
    )]
    TooNew {
        /// The file's version.
        found: Version,
        /// The newest version this build reads.
        supported: Version,
    },
    /// Nothing after the first bytes can be used.
    #[error("the trace's header is damaged at byte {offset}: {what}; nothing can be recovered from this file")]
    Header {
        /// Where.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// Bytes that no encoder of ours writes.
    #[error("malformed {what}")]
    Malformed {
        /// Which record or field.
        what: &'static str,
    },
}

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
