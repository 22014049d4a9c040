//! What can go wrong between a run folder and its report. Every message names the file and says what to do next.

use std::path::PathBuf;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("{what}: {cause}")]
    Io {
        /// What was being done, with the path.
        what: String,
        /// The system's answer.
        cause: std::io::Error,
    },
    /// There is nothing at this path.
    #[error("{} does not exist; give a run folder, a .mtr file or a PyTorch snapshot", path.display())]
    NoSuchRun {
        /// The path that was given.
        path: PathBuf,
    },
    /// A folder without any trace.
    #[error(
        "{} holds no trace (*.mtr): the program allocated no GPU memory and no tensors, or this is not a run folder; \
         give the folder that memtrace named when the run ended", path.display()
    )]
    NoTraces {
        /// The folder.
        path: PathBuf,
    },
    /// A trace could not be opened.
    #[error("{}: {cause}", path.display())]
    Trace {
        /// The trace.
        path: PathBuf,
        /// Why.
        cause: memtrace_trace::error::Error,
    },
    /// A PyTorch snapshot could not be read, or the file is none.
    #[error("{}: {why}", path.display())]
    Snapshot {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        why: String,
    },
    /// None of the traces of a run could be opened.
    #[error("none of the {count} traces in {} can be read; the first: {first}", path.display())]
    NoReadableTrace {
        /// The run folder.
        path: PathBuf,
        /// How many there are.
        count: usize,
        /// What is wrong with the first.
        first: String,
    },
    /// A window of an export that nothing lies in.
    #[error("{what}")]
    EmptyWindow {
        /// Whose it is, what was asked for and what there is.
        what: String,
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
