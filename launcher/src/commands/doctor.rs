//! `memtrace doctor`: checks what can be recorded on this machine and in this program.

use memtrace_analysis::printable;

use crate::cli::Doctor;
use crate::terminal::layout;
use crate::{doctor, message};

/// The exit code when all checks passed.
const PASSED: u8 = 0;
/// The exit code when a check failed.
const FAILED: u8 = 1;

/// Prints the report and returns the exit code.
pub(crate) fn doctor(options: &Doctor) -> u8 {
    if options.self_test_program {
        return doctor::self_test_program();
    }
    let report = match doctor::run_checks(options) {
        Ok(report) => report,
        Err(e) => {
            message::report(&e);
            return super::BAD_INPUT;
        }
    };
    let text = if options.json {
        printable::json(serde_json::to_string_pretty(&report).unwrap_or_default() + "\n")
    } else {
        doctor::to_text(&report, layout(&std::io::stdout(), false).color)
    };
    if let Err(e) = super::print(text.as_bytes()) {
        message::error(&format!("cannot write to stdout: {e}"), None);
        return super::BAD_INPUT;
    }
    if report.ok { PASSED } else { FAILED }
}
