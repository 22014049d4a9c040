//! Errors of tools. The agent reads them: they say what failed, and in a second line what to do.

use memtrace_analysis::printable;
use rmcp::model::{CallToolResult, ContentBlock};

/// The maximum length of each line, in characters.
const MAX_LINE: usize = 1000;
/// The help for invalid arguments.
pub(crate) const INPUT_SCHEMA: &str = "the input schema of the tool lists its arguments";

/// A call that failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ToolError {
    text: String,
    help: Option<String>,
}

impl ToolError {
    /// An error with this text. `help` says what to do.
    pub(crate) fn new(text: impl Into<String>, help: impl Into<String>) -> ToolError {
        ToolError { text: text.into(), help: Some(help.into()) }
    }

    /// An error of the `memtrace` binary, from what it printed on stderr.
    pub(crate) fn from_messages(stderr: &str, ending: &str) -> ToolError {
        let lines = || stderr.lines().map(|line| line.strip_prefix("memtrace: ").unwrap_or(line));
        let after = |kind: &str| lines().find_map(|line| line.strip_prefix(kind)).map(str::to_owned);
        let text = after("error: ").unwrap_or_else(|| match lines().rfind(|line| !line.trim().is_empty()) {
            Some(line) => format!("memtrace failed ({ending}): {line}"),
            None => format!("memtrace failed ({ending})"),
        });
        // The command line refused a value that the client chose.
        let is_usage = lines().any(|line| line.starts_with("For more information, try"));
        let help = after("help: ").or_else(|| is_usage.then(|| INPUT_SCHEMA.to_owned()));
        ToolError { text, help }
    }

    /// The answer to the call.
    pub(crate) fn into_result(self) -> CallToolResult {
        // Names and messages come from the recorded program, and the client shows them.
        let line = |text: String| printable::output_line(&text);
        let mut text = line(format!("error: {}", clip(&self.text)));
        if let Some(help) = &self.help {
            text += &format!("\n{}", line(format!("help: {}", clip(help))));
        }
        CallToolResult::error(vec![ContentBlock::text(text)])
    }
}

/// The beginning of a text, if it is longer than a line may be.
fn clip(text: &str) -> String {
    match text.char_indices().nth(MAX_LINE) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_memtrace_become_errors() {
        let error =
            ToolError::from_messages("warning: x\nerror: cannot read a: no\nhelp: pass a run\n", "exit status 2");
        assert_eq!(error, ToolError::new("cannot read a: no", "pass a run"));
        let error = ToolError::from_messages("memtrace: error: no\n", "exit status 2");
        assert_eq!((error.text.as_str(), error.help), ("no", None));
        let error = ToolError::from_messages("thread 'main' panicked\n\n", "exit status 101");
        assert_eq!(error.text, "memtrace failed (exit status 101): thread 'main' panicked");
        let usage = "error: invalid value 't5'\n\nFor more information, try '--help'.\n";
        let error = ToolError::from_messages(usage, "exit status 2");
        assert_eq!(error, ToolError::new("invalid value 't5'", INPUT_SCHEMA));
        assert_eq!(ToolError::from_messages("", "signal 9").text, "memtrace failed (signal 9)");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(clip(&"ä".repeat(1000)).chars().count(), 1000);
        assert_eq!(clip(&"ä".repeat(1001)).chars().count(), 1003);
    }
}
