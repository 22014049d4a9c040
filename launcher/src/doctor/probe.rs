//! One short recording of a program of doctor's own choice, by this very binary, with nothing printed and a time limit.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How often it is looked whether the program has ended.
const LOOK_EVERY: Duration = Duration::from_millis(3);

/// What came of it.
#[derive(Debug)]
pub(super) struct Probed {
    /// `None`: it was ended, being too slow.
    pub(super) status: Option<ExitStatus>,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Probed {
    /// The last line of what was complained about, or how it ended.
    pub(super) fn complaint(&self) -> String {
        let last = self.stderr.lines().rev().find(|l| !l.trim().is_empty());
        match (last, self.status) {
            (Some(line), _) => line.trim().to_owned(),
            (None, Some(status)) => status.to_string(),
            (None, None) => "it did not end in time".to_owned(),
        }
    }
}

/// Records `command` into `folder`/run, CPU tensors included.
pub(super) fn record(folder: &Path, command: &[OsString], patience: Duration) -> io::Result<Probed> {
    std::fs::create_dir_all(folder)?;
    let (out, err) = (folder.join("stdout"), folder.join("stderr"));
    let mut memtrace = Command::new(std::env::current_exe()?);
    memtrace.args(["run", "--quiet", "--no-snapshot", "--cpu", "always", "-o"]).arg(folder.join("run")).arg("--");
    memtrace.args(command).stdin(Stdio::null()).stdout(File::create(&out)?).stderr(File::create(&err)?);
    // A group of its own: Ctrl-C ends us, and a slow one can be ended with all its children.
    let mut child = memtrace.process_group(0).spawn()?;
    let began = Instant::now();
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if began.elapsed() > patience => {
                // SAFETY: the group of a child that has not been collected.
                unsafe { libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL) };
                child.wait()?;
                break None;
            }
            None => std::thread::sleep(LOOK_EVERY),
        }
    };
    let text = |path: &Path| std::fs::read(path).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
    Ok(Probed { status, stdout: text(&out), stderr: text(&err) })
}

/// The traces of a recording.
pub(super) fn traces(folder: &Path) -> Vec<memtrace_trace::file::Reader> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(|e| Some(e.ok()?.path()));
    let mut paths: Vec<_> = entries.filter(|p| p.extension() == Some(OsStr::new("mtr"))).collect();
    paths.sort();
    paths.into_iter().filter_map(|p| memtrace_trace::file::Reader::open(p).ok()).collect()
}
