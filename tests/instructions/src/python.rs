//! Selects the Python interpreter for the probe. Reading a frame costs a few percent more or less, depending on the
//! Python release. So the baseline belongs to one release, and only that release is compared with it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::baseline::release;

/// A Python interpreter.
#[derive(Clone, Debug)]
pub(crate) struct Python {
    /// The path of the interpreter itself: `python3` may be a script that selects one.
    pub(crate) path: PathBuf,
    pub(crate) version: String,
    /// The version of the C library that it runs with.
    pub(crate) glibc: String,
}

impl Python {
    /// Runs an interpreter and reads its path and versions. Fails when it cannot run.
    pub(crate) fn ask(python: &Path) -> Result<Python> {
        let what = "import os, sys, platform\n\
            print(os.path.realpath(sys.executable), platform.python_version(), platform.libc_ver()[1] or '?', \
            sep='\\n')";
        let text = stdout_of(Command::new(python).args(["-c", what]))?;
        let mut lines = text.lines().map(str::to_owned);
        let mut line =
            || lines.next().with_context(|| format!("{} does not print its path and version", python.display()));
        Ok(Python { path: line()?.into(), version: line()?, glibc: line()? })
    }

    /// Finds an interpreter of this release: `python3`, another one on PATH, or one of pyenv's.
    pub(crate) fn of_release(release: &str) -> Result<Python> {
        let pyenv = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
        let pyenv = pyenv.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv")));
        let mut candidates = vec![PathBuf::from("python3"), PathBuf::from(format!("python{release}"))];
        let versions = pyenv.and_then(|p| std::fs::read_dir(p.join("versions")).ok()).into_iter().flatten();
        candidates.extend(versions.filter_map(|entry| Some(entry.ok()?.path().join("bin/python3"))));
        let found = candidates.iter().filter_map(|c| Python::ask(c).ok()).find(|p| p.release() == release);
        found.with_context(|| {
            format!(
                "the baseline is of Python {release}, and there is none on PATH or in pyenv: name one with --python, \
                 or measure another with --python and --accept"
            )
        })
    }

    /// The release, such as `3.11`.
    pub(crate) fn release(&self) -> &str {
        release(&self.version)
    }
}

/// The trimmed stdout of a command. Fails, with its stderr, when the command fails.
pub(crate) fn stdout_of(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {:?}", command.get_program()))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
