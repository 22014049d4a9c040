//! Refusals to start a command, with their exit codes.

use crate::message::help_of;

/// The exit code when memtrace itself fails.
pub(crate) const MEMTRACE_FAILED: u8 = 125;
/// The exit code for a command that was found but cannot be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The exit code for a command that was not found.
pub(crate) const NOT_FOUND: u8 = 127;

/// Why the command is not started.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Refusal {
    /// The exit code.
    pub(crate) code: u8,
    /// The error.
    pub(crate) message: String,
    /// The help for the user. `None` when nothing helps.
    pub(crate) help: Option<String>,
}

impl From<anyhow::Error> for Refusal {
    fn from(error: anyhow::Error) -> Refusal {
        Refusal { code: MEMTRACE_FAILED, message: format!("{error:#}"), help: help_of(&error) }
    }
}

/// A refusal with a help line, as the result of a check.
pub(super) fn refuse<T>(code: u8, message: impl Into<String>, help: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { code, message: message.into(), help: Some(help.into()) })
}
