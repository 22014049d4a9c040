//! `memtrace doctor`: what can be recorded on this machine and of this program.

use std::io::IsTerminal;

use crate::cli::Doctor;
use crate::closing::layout;
use crate::{doctor, say};

/// All that can be seen is seen.
const YES: u8 = 0;
/// Something is off.
const NO: u8 = 1;

/// Prints the page and gives the exit code.
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
