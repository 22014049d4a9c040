//! The process that writes a rotated trace: this program once more, under another name. It reads what the traced
//! process has sent, so its memory is bounded, and its end does not end the launcher.
//!
//! The old trace is its stdin, the new one its stdout, and the run folder its working directory: it reads the file
//! beside the old trace there, and writes that of the new trace under another name. It writes two numbers to stderr, or
//! nothing if there is nothing to drop, or says what is wrong.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};

use anyhow::{Context as _, bail};
use memtrace_analysis::rewrite::{Keep, Rotated, rotate};
use memtrace_analysis::{KeptState, RunFolder};

use rustix::process::{Resource, Rlimit, geteuid, setrlimit};

use crate::output::{Stream, pipe_to_launcher};
use crate::sandbox::{self, Priority};

/// The name of the process: its first argument.
const NAME: &str = "memtrace-rotate";
/// The exit code of a rotation that failed.
const FAILED: u8 = 2;

/// The longest report of the process, in bytes.
const MAX_REPORT: u64 = 4096;

/// The output of the process.
#[derive(Debug)]
pub(super) struct Written {
    /// The offset in the old trace up to which its frames are in the new one, or dropped.
    pub(super) copied_to: u64,
    /// The number of events that the new trace lacks.
    pub(super) missing: u64,
}

/// The name under which the process writes the file beside the new trace. `trace` is the name of the trace.
pub(super) fn kept_state_part(trace: &str) -> String {
    format!(".{}.part", KeptState::file_name(trace).display())
}

/// Starts the process. The new trace has at most `limit` bytes. `name` is that of the old one in the folder.
pub(super) fn start(
    folder: &RunFolder,
    name: &str,
    old: &File,
    new: &File,
    keep: Keep,
    limit: u64,
    priority: Priority,
) -> io::Result<Child> {
    let (kind, number) = match keep {
        Keep::Bytes(bytes) => ("bytes", bytes),
        Keep::Since(ticks) => ("since", ticks),
    };
    sandbox::background_process(NAME)
        .args([priority.name(), kind, &number.to_string(), &limit.to_string(), name])
        .current_dir(format!("/proc/self/fd/{}", folder.descriptor().as_fd().as_raw_fd()))
        .stdin(old.try_clone()?)
        .stdout(new.try_clone()?)
        .stderr(Stdio::piped())
        .spawn()
}

/// The report of the process, until it ends.
pub(super) fn read(child: &mut Child) -> String {
    let mut bytes = Vec::new();
    if let Some(stderr) = &mut child.stderr {
        // Bytes that cannot be read are missing in the result.
        let _ = stderr.take(MAX_REPORT).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The result, from what the process has reported and from its status. `None` if there is nothing to drop.
pub(super) fn result(text: &str, status: io::Result<ExitStatus>) -> anyhow::Result<Option<Written>> {
    let status = status.context("cannot wait for the process that writes the new trace")?;
    if !status.success() {
        let reason = text.lines().last().map_or_else(|| status.to_string(), str::to_owned);
        bail!("cannot write the new trace: {reason}");
    }
    let numbers: Option<Vec<u64>> = text.split_whitespace().map(|word| word.parse().ok()).collect();
    match numbers.as_deref() {
        Some([]) => Ok(None),
        Some(&[copied_to, missing]) => Ok(Some(Written { copied_to, missing })),
        _ => bail!("cannot write the new trace: {text}"),
    }
}

/// The request to this process: what to keep of the trace with this name, and the maximum length of each new file in
/// bytes.
#[derive(Debug)]
pub(crate) struct Request {
    priority: Priority,
    keep: Keep,
    limit: u64,
    name: String,
}

/// The request to this process. `None` if it is another one.
pub(crate) fn requested() -> Option<Request> {
    let mut arguments = std::env::args_os();
    if arguments.next()? != NAME {
        return None;
    }
    let priority = Priority::from_name(arguments.next()?.to_str()?)?;
    let kind = arguments.next()?;
    let mut number = || arguments.next()?.to_str()?.parse().ok();
    let (number, limit) = (number()?, number()?);
    let keep = if kind == "bytes" { Keep::Bytes(number) } else { Keep::Since(number) };
    Some(Request { priority, keep, limit, name: arguments.next()?.into_string().ok()? })
}

/// Writes the rotated trace, and returns the exit code.
pub(crate) fn run(Request { priority, keep, limit, name }: Request) -> u8 {
    // A write beyond it fails (the signal for it is ignored), as on a full disk.
    // SAFETY: `SIG_IGN` installs no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let _ = setrlimit(Resource::Fsize, Rlimit { current: Some(limit), maximum: Some(limit) });
    sandbox::restrict_background_process(priority);
    let text = match write(keep, &name) {
        Ok(None) => return 0,
        Ok(Some((copied_to, missing))) => (0, format!("{copied_to} {missing}")),
        Err(e) => (FAILED, format!("{e:#}")),
    };
    // Nobody reads it if the launcher has ended.
    let _ = writeln!(pipe_to_launcher(Stream::Stderr), "{}", text.1);
    text.0
}

fn write(keep: Keep, name: &str) -> anyhow::Result<Option<(u64, u64)>> {
    let file = |descriptor: io::Result<std::os::fd::OwnedFd>| descriptor.map(File::from).context("no trace");
    let old = file(io::stdin().as_fd().try_clone_to_owned())?;
    let new = file(Stream::Stdout.as_fd().try_clone_to_owned())?;
    let folder = RunFolder::open(Path::new(".")).context("cannot open the run folder")?;
    let kept_state = || folder.open_file_of(KeptState::file_name(name), geteuid().as_raw());
    let Some(Rotated { copied_to, missing, kept_state, .. }) =
        rotate(Path::new("the trace"), old, kept_state, keep, new)?
    else {
        return Ok(None);
    };
    let mut file = folder.create_replacing(kept_state_part(name)).context("cannot create the file beside the trace")?;
    file.write_all(&kept_state).and_then(|()| file.sync_data()).context("cannot write the file beside the trace")?;
    Ok(Some((copied_to, missing)))
}
