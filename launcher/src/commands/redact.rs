//! `memtrace redact`: writes a copy of a run for others, without the names of its program, files, host and user.

use std::io::IsTerminal;

use anyhow::{Context, ensure};
use memtrace_analysis::export::KEY_BYTES;
use memtrace_analysis::{FinishOptions, can_redact, redact_run};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::cli::Redact;
use crate::folder;
use crate::message::{self, WithHelp};
use crate::terminal::ProgressLine;

/// Writes the copy. Fails when the run cannot be read or a file cannot be written.
pub(crate) fn redact(options: &Redact) -> anyhow::Result<()> {
    let run = super::open(&options.run)?;
    ensure!(
        can_redact(&run),
        WithHelp::new(
            format!("cannot redact {}: it is a snapshot of PyTorch", options.run.display()),
            "record the program with memtrace -- COMMAND, and redact the run folder"
        )
    );
    let out = folder::create(folder::Place::At(&options.output), &[], "")?.folder;
    let name = options.output.file_name().map_or("redacted".into(), |name| name.to_string_lossy().into_owned());
    let finish_options =
        FinishOptions { no_snapshot: options.no_snapshot, shown_path: Some(name), ..FinishOptions::default() };
    let mut line = ProgressLine::new(std::io::stderr().is_terminal());
    let written = redact_run(&run, &out, key()?, &finish_options, &mut |progress| line.show(&progress));
    line.clear();
    for problem in written?.problems {
        message::warning(&format!("{}: {}", problem.path.display(), problem.text));
    }
    message::status(&format!("wrote {}", options.output.display()));
    message::note("names of public packages, figures, shapes and times stay; look at the copy before you pass it on");
    Ok(())
}

/// A random key. It is gone when this process ends.
fn key() -> anyhow::Result<[u8; KEY_BYTES]> {
    let mut key = [0; KEY_BYTES];
    let read = getrandom(&mut key, GetRandomFlags::empty()).context("cannot read random numbers")?;
    ensure!(read == KEY_BYTES, "cannot read random numbers: the system returned {read} bytes");
    Ok(key)
}
