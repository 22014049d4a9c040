//! One thin file a subcommand.

pub(crate) mod export;
pub(crate) mod report;
pub(crate) mod run;

use std::io::{self, Write};

use crate::say;

/// The exit code of the reading commands when something is wrong with their input.
const BAD_INPUT: u8 = 2;

/// The exit code of a reading command, with its error on stderr.
pub(crate) fn conclude(result: anyhow::Result<()>) -> u8 {
    match result {
        Ok(()) => 0,
        Err(e) => {
            say(&format!("{e:#}"));
            BAD_INPUT
        }
    }
}

/// Prints on stdout. A reader that has had enough (`| head`) is no error.
fn print(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}
