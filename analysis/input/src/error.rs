//! The errors between a run folder and its report. A message says what cannot be done, with the path, and the reason.
//! [`Error::help`] says what the user can do.

use std::path::PathBuf;

use memtrace_trace::error::Error as TraceError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("{context}: {cause}")]
    Io {
        /// The operation that failed, with the path.
        context: String,
        /// The error of the operating system.
        cause: std::io::Error,
    },
    /// Nothing exists at this path.
    #[error("cannot read {}: No such file or directory", path.display())]
    NoSuchRun {
        /// The path that was given.
        path: PathBuf,
    },
    /// A folder without any trace.
    #[error("cannot read {}: the folder contains no trace (*.mtr) and no snapshot (*.pickle, *.json)", path.display())]
    NoTraces {
        /// The folder.
        path: PathBuf,
    },
    /// A run without any recorded process.
    #[error("cannot read {}: no process was recorded: {}", path.display(), nothing_recorded(reasons))]
    NothingRecorded {
        /// The run folder.
        path: PathBuf,
        /// The known gaps of the recording. Empty if every process could be recorded.
        reasons: Vec<String>,
    },
    /// A trace could not be opened.
    #[error("cannot read {}: {}", path.display(), trace_reason(cause))]
    Trace {
        /// The trace.
        path: PathBuf,
        /// The cause.
        cause: TraceError,
    },
    /// A PyTorch snapshot could not be read, or the file is not a snapshot.
    #[error("cannot read {}: {reason}", path.display())]
    Snapshot {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
        /// Help for the user; empty if nothing helps.
        help: String,
    },
    /// None of the traces of a run could be opened.
    #[error("cannot read any of the {count} traces in {}, for example {example}", path.display())]
    NoReadableTrace {
        /// The run folder.
        path: PathBuf,
        /// The number of traces.
        count: usize,
        /// One of them, and what is wrong with it.
        example: String,
    },
    /// A folder of snapshots of which none could be read.
    #[error("cannot read any of the {count} snapshots in {}, for example {example}", path.display())]
    NoReadableSnapshot {
        /// The folder.
        path: PathBuf,
        /// The number of files with the name of a snapshot.
        count: usize,
        /// One of them, and what is wrong with it.
        example: String,
    },
    /// A folder of runs from which no job can be merged.
    #[error("{reason}")]
    Job {
        /// The folder, and what is wrong.
        reason: String,
        /// Help for the user.
        help: String,
    },
    /// An export window without any event.
    #[error("{reason}")]
    EmptyWindow {
        /// The process and the requested window.
        reason: String,
        /// The events that the process has instead.
        help: String,
    },
}

impl Error {
    /// Makes an I/O error. `context` is the operation that failed, with the path.
    pub fn io(context: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
        let context = context.into();
        move |cause| Error::Io { context, cause }
    }

    /// The reason without the path, for a message that begins with the path.
    pub fn reason(&self) -> String {
        match self {
            Error::Io { cause, .. } => cause.to_string(),
            Error::Trace { cause, .. } => trace_reason(cause),
            Error::Snapshot { reason, .. } => reason.clone(),
            other => other.to_string(),
        }
    }

    /// Help for the user; `None` if the message says everything.
    pub fn help(&self) -> Option<&str> {
        match self {
            Error::NoSuchRun { .. } => Some("pass a run folder, a .mtr file or a PyTorch snapshot"),
            Error::NoTraces { .. } => Some(
                "pass a folder of PyTorch snapshots, or the run folder that memtrace printed at the end of the run; \
                 a program that allocates no GPU memory and no tensors leaves no trace",
            ),
            Error::NoReadableSnapshot { .. } => {
                Some("pass a folder with files that torch.cuda.memory._dump_snapshot wrote")
            }
            Error::NothingRecorded { reasons, .. } if reasons.is_empty() => {
                Some("record a program that allocates GPU memory, or CPU tensors with PyTorch")
            }
            Error::NothingRecorded { .. } => Some("record the program again; run.json lists the processes"),
            Error::Trace { cause: TraceError::NotATrace { .. }, .. } => Some("pass a .mtr file or a run folder"),
            Error::Trace { cause: TraceError::TooNew { .. }, .. } => {
                Some("use the memtrace version that recorded the trace, or a newer one")
            }
            Error::Snapshot { help, .. } | Error::EmptyWindow { help, .. } | Error::Job { help, .. } => {
                Some(help).filter(|help| !help.is_empty()).map(String::as_str)
            }
            _ => None,
        }
    }
}

/// The reasons in the message about a run without a recording.
fn nothing_recorded(reasons: &[String]) -> String {
    match reasons {
        [] => "none that memtrace can record allocated GPU memory".to_owned(),
        _ => reasons.join("; "),
    }
}

/// The reason why a trace cannot be read. The path is left out, because the message already has it.
fn trace_reason(cause: &TraceError) -> String {
    match cause {
        TraceError::Io { cause, .. } => cause.to_string(),
        other => other.to_string(),
    }
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
