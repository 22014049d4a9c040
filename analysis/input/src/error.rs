//! The errors between a run folder and its report. Every message names the file and says what to do next.

use std::path::PathBuf;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("{what}: {cause}")]
    Io {
        /// What was being done, with the path.
        what: String,
        /// The error of the operating system.
        cause: std::io::Error,
    },
    /// Nothing exists at this path.
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
        /// The cause.
        cause: memtrace_trace::error::Error,
    },
    /// A PyTorch snapshot could not be read, or the file is not a snapshot.
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
        /// The number of traces.
        count: usize,
        /// What is wrong with the first trace.
        first: String,
    },
    /// An export window without any event.
    #[error("{what}")]
    EmptyWindow {
        /// The process, the requested window and the available range.
        what: String,
    },
}

impl Error {
    /// Makes an I/O error. `what`: what was being done, with the path.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let what = what.into();
        move |cause| Error::Io { what, cause }
    }
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
