//! Makes one short recording of a test program with this same binary, without output and with a time limit.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// How often the probe checks whether the program has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(3);

/// The bytes of the program's output that are read. A Python can print anything when it starts.
const MAX_OUTPUT: u64 = 1 << 20;

/// The result of a recording.
#[derive(Debug)]
pub(super) struct ProbeResult {
    /// `None` when the program was killed at the time limit.
    pub(super) status: Option<ExitStatus>,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl ProbeResult {
    /// The error of memtrace, else the last line on stderr, else a description of how the program ended.
    pub(super) fn failure_reason(&self) -> String {
        let error = self.stderr.lines().find_map(|line| line.strip_prefix("memtrace: error: "));
        let last = || self.stderr.lines().rev().find(|line| !line.trim().is_empty());
        match (error.or_else(last), self.status) {
            (Some(line), _) => line.trim().to_owned(),
            (None, Some(status)) => status.to_string(),
            (None, None) => "it did not end in time".to_owned(),
        }
    }

    /// The help that memtrace printed. `None` when there is none.
    pub(super) fn help(&self) -> Option<&str> {
        self.stderr.lines().find_map(|line| line.strip_prefix("memtrace: help: "))
    }
}

/// Records `command` into `folder`/run, including CPU tensors. Kills it after `timeout`.
///
/// Fails when a file or the process cannot be created.
pub(super) fn record(folder: &Path, command: &[OsString], timeout: Duration) -> io::Result<ProbeResult> {
    std::fs::create_dir_all(folder)?;
    // The program can replace the files, but not these.
    let (out, err) = (create(&folder.join("stdout"))?, create(&folder.join("stderr"))?);
    let mut memtrace = Command::new(std::env::current_exe()?);
    memtrace.args(["run", "--quiet", "--no-snapshot", "--cpu", "always", "-o"]).arg(folder.join("run")).arg("--");
    memtrace.args(command).stdin(Stdio::null()).stdout(out.try_clone()?).stderr(err.try_clone()?);
    // Use a process group of its own. Ctrl-C then ends only doctor, and a slow program can be killed with all its
    // children.
    let mut child = memtrace.process_group(0).spawn()?;
    let began = Instant::now();
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if began.elapsed() > timeout => {
                // The child leads its group and is not collected yet, so the group id was not reused.
                let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
                child.wait()?;
                break None;
            }
            None => std::thread::sleep(POLL_INTERVAL),
        }
    };
    let text = |mut file: File| {
        let mut text = Vec::new();
        let read = file.rewind().and_then(|()| file.take(MAX_OUTPUT).read_to_end(&mut text));
        read.map(|_| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default()
    };
    Ok(ProbeResult { status, stdout: text(out), stderr: text(err) })
}

/// Creates a file for output that is read again.
fn create(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(true).open(path)
}

/// The readable traces of a recording, sorted by path.
pub(super) fn traces(folder: &Path) -> Vec<memtrace_trace::file::Reader> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(|e| Some(e.ok()?.path()));
    let mut paths: Vec<_> = entries.filter(|p| p.extension() == Some(OsStr::new("mtr"))).collect();
    paths.sort();
    paths.into_iter().filter_map(|p| memtrace_trace::file::Reader::open(p).ok()).collect()
}
