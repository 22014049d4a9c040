//! Messages on stderr, in the form that rustc, cargo and uv use.
//!
//! The first word of a line is its kind: `error:`, `warning:`, `note:` or `help:`. An error names the thing that failed
//! and the system's reason. The help line after it says what to do. `memtrace run` shares stderr with the command that
//! it records, so its lines begin with `memtrace: `.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_analysis::printable;

use crate::output::{Printed, print_to_stderr};

/// Whether the lines begin with `memtrace: `.
static HAS_PREFIX: AtomicBool = AtomicBool::new(false);

/// Begins every later line with `memtrace: `, because another program writes to stderr too.
pub(crate) fn use_prefix() {
    HAS_PREFIX.store(true, Ordering::Relaxed);
}

/// Prints an error, and what the user can do about it.
pub(crate) fn error(text: &str, help: Option<&str>) {
    line("error: ", text);
    if let Some(text) = help {
        self::help(text);
    }
}

/// Prints an error with its causes, and the help that one of them carries.
pub(crate) fn report(error: &anyhow::Error) {
    self::error(&format!("{error:#}"), help_of(error).as_deref());
}

/// Prints a warning.
pub(crate) fn warning(text: &str) {
    line("warning: ", text);
}

/// Prints what the user can do about the message before.
pub(crate) fn help(text: &str) {
    line("help: ", text);
}

/// Prints a fact that adds to the message before.
pub(crate) fn note(text: &str) {
    line("note: ", text);
}

/// Prints what was done, such as a file that was written.
pub(crate) fn status(text: &str) {
    line("", text);
}

/// Prints one line. A closed stderr is not an error.
fn line(kind: &str, text: &str) {
    let prefix = if HAS_PREFIX.load(Ordering::Relaxed) { "memtrace: " } else { "" };
    let text = without_error_numbers(text);
    // A line end in a name does not begin a line.
    let line = printable::output_line(&format!("{prefix}{kind}{text}"));
    print_to_stderr(Printed::Text(&(line + "\n")));
}

/// Removes ` (os error 2)`, which the standard library appends to the system's reasons.
pub(crate) fn without_error_numbers(text: &str) -> String {
    let mut parts = text.split(" (os error ");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |shown, part| {
        shown + part.trim_start_matches(|c: char| c.is_ascii_digit()).trim_start_matches(')')
    })
}

/// The text of an error together with what the user can do about it. It serves as an error and as the context of one.
#[derive(Clone, Debug)]
pub(crate) struct WithHelp {
    text: String,
    help: String,
}

impl WithHelp {
    /// An error with this text. `help` says what to do.
    pub(crate) fn new(text: impl Into<String>, help: impl Into<String>) -> WithHelp {
        WithHelp { text: text.into(), help: help.into() }
    }
}

impl fmt::Display for WithHelp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for WithHelp {}

/// The help for an error. `None` when no cause of it says that.
pub(crate) fn help_of(error: &anyhow::Error) -> Option<String> {
    let ours = error.downcast_ref::<WithHelp>().map(|e| e.help.clone());
    ours.or_else(|| error.downcast_ref::<memtrace_analysis::Error>()?.help().map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn help_is_found_below_and_above_other_context() {
        let cause = || anyhow::Error::from(std::io::Error::from_raw_os_error(libc::ENOENT));
        assert_eq!(help_of(&cause()), None);
        let above = Err::<(), _>(cause()).context(WithHelp::new("cannot read x", "name another file")).unwrap_err();
        assert_eq!(format!("{above:#}"), "cannot read x: No such file or directory (os error 2)");
        assert_eq!(help_of(&above).as_deref(), Some("name another file"));
        let below = anyhow::Error::from(WithHelp::new("x is empty", "record it again")).context("cannot compare");
        assert_eq!(format!("{below:#}"), "cannot compare: x is empty");
        assert_eq!(help_of(&below).as_deref(), Some("record it again"));
    }

    #[test]
    fn error_numbers_are_removed() {
        assert_eq!(
            without_error_numbers("cannot read x: Is a directory (os error 21); y"),
            "cannot read x: Is a directory; y"
        );
        assert_eq!(without_error_numbers("a (b)"), "a (b)");
    }
}
