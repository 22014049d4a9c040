//! One thin file a subcommand.

pub(crate) mod doctor;
pub(crate) mod export;
pub(crate) mod report;
pub(crate) mod run;

use std::io::{self, Write};

use crate::{confined, say};

/// The exit code of the reading commands when something is wrong with their input.
const BAD_INPUT: u8 = 2;

/// Does what a reading command does, confined; gives its exit code, with its error on stderr.
pub(crate) fn read(command: impl FnOnce() -> anyhow::Result<()>) -> u8 {
    let code = confined::run(|| match command() {
        Ok(()) => 0,
        Err(e) => {
            say(&format!("{e:#}"));
            BAD_INPUT
        }
    });
    code.unwrap_or_else(|why| {
        say(&format!("reading this run {why}"));
        BAD_INPUT
    })
}

/// Prints on stdout. A reader that has had enough (`| head`) is no error.
fn print(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}
