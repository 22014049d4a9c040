//! `memtrace doctor`: checks what can be recorded on this machine and in this program.

use crate::cli::Doctor;
use crate::output::{Printed, Stream, print};
use crate::terminal::layout;
use crate::{clean, doctor, message};

/// The exit code when all checks passed.
const PASSED: u8 = 0;
/// The exit code when a check failed.
const FAILED: u8 = 1;

/// Prints the report and returns the exit code.
pub(crate) fn doctor(options: &Doctor) -> u8 {
    if options.self_test_program {
        return doctor::self_test_program();
    }
    if options.clean {
        return match clean::clean(options.yes) {
            Ok(true) => PASSED,
            Ok(false) => FAILED,
            Err(e) => {
                message::report(&e);
                super::BAD_INPUT
            }
        };
    }
    let report = match doctor::run_checks(options) {
        Ok(report) => report,
        Err(e) => {
            message::report(&e);
            return super::BAD_INPUT;
        }
    };
    let printed = if options.json {
        print(Printed::Json(&(serde_json::to_string_pretty(&report).unwrap_or_default() + "\n")))
    } else {
        print(Printed::Styled(&doctor::to_text(&report, layout(Stream::Stdout, false).color)))
    };
    if let Err(e) = printed {
        message::error(&format!("cannot write to stdout: {e}"), None);
        return super::BAD_INPUT;
    }
    if report.ok { PASSED } else { FAILED }
}
