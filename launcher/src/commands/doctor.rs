//! `memtrace doctor`: checks what can be recorded on this machine and in this program.

use std::io::IsTerminal;

use crate::cli::Doctor;
use crate::closing::layout;
use crate::{doctor, say};

/// The exit code when everything can be recorded.
const YES: u8 = 0;
/// The exit code when a problem was found.
const NO: u8 = 1;

/// Prints the report and returns the exit code.
pub(crate) fn doctor(options: &Doctor) -> u8 {
    if options.victim {
        return doctor::victim();
    }
    let diagnosis = match doctor::examine(options) {
        Ok(diagnosis) => diagnosis,
        Err(e) => {
            say(&format!("{e:#}"));
            return super::BAD_INPUT;
        }
    };
    let text = if options.json {
        serde_json::to_string_pretty(&diagnosis).unwrap_or_default() + "\n"
    } else {
        doctor::page(&diagnosis, layout(std::io::stdout().is_terminal()).colour)
    };
    if let Err(e) = super::print(text.as_bytes()) {
        say(&format!("cannot print: {e}"));
        return super::BAD_INPUT;
    }
    if diagnosis.ok { YES } else { NO }
}
