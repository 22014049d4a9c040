//! `memtrace redact`: writes a copy of a run for others, without the names of its program, files, host and user.

use std::path::Path;

use anyhow::{Context, ensure};
use memtrace_analysis::rewrite::KEY_BYTES;
use memtrace_analysis::{FinishOptions, RunFolder, can_redact, redact_run};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::cli::Redact;
use crate::folder;
use crate::message::{self, WithHelp};
use crate::output::Stream;
use crate::terminal::ProgressLine;

/// Writes the copy, and returns the exit code. A copy that is not complete is removed.
pub(crate) fn redact(options: &Redact) -> u8 {
    let output = &options.output;
    let missing: Vec<&Path> = output.ancestors().take_while(|path| path.symlink_metadata().is_err()).collect();
    // The folder is claimed in this process, so that its files are those of the worker, however that ends.
    let code = match folder::create(folder::Place::At(output), &[], "") {
        Ok(created) => {
            let code = super::sandboxed(|| write(options, &created.folder));
            if code != 0 {
                remove_files(&created.folder);
            }
            code
        }
        Err(e) => super::exit_code(Err(e)),
    };
    if code != 0 {
        // The first one that is not empty ends it.
        let _ = missing.into_iter().try_for_each(std::fs::remove_dir);
    }
    code
}

/// Removes the files of the folder. A file that stays is one more in a folder that has no report.
fn remove_files(folder: &RunFolder) {
    for name in folder.file_names().unwrap_or_default() {
        let _ = folder.remove(name);
    }
}

/// Writes the copy. Fails when the run cannot be read or a file cannot be written.
fn write(options: &Redact, out: &RunFolder) -> anyhow::Result<()> {
    let run = super::open_or_newest(options.run.as_deref())?;
    ensure!(
        can_redact(&run),
        WithHelp::new(
            format!("cannot redact {}: it is a snapshot of PyTorch", run.path().display()),
            "record the program with memtrace -- COMMAND, and redact the run folder"
        )
    );
    let name = options.output.file_name().map_or("redacted".into(), |name| name.to_string_lossy().into_owned());
    let finish_options =
        FinishOptions { no_snapshot: options.no_snapshot, shown_path: Some(name), ..FinishOptions::default() };
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let written = redact_run(&run, out, key()?, &finish_options, &mut |progress| line.show(&progress));
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
