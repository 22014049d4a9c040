//! Finds running recordings, and asks their launchers to write out what was recorded so far.
//!
//! Each launcher listens on a socket whose name has its user id (`session`), and `/proc/net/unix` lists all sockets of
//! the network namespace. So there is no file that a killed launcher leaves behind, and nothing to clean up. The traced
//! processes take no part in it: no signal, no thread, no pause.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use memtrace_analysis::RunFolder;
use memtrace_analysis::load::{Manifest, RunState};

use crate::control::{Answer, Request};
use crate::inquiry::{self, Reply};
use crate::message::WithHelp;
use crate::proc::ProcessDir;
use crate::session::is_token;

/// The help about a process that is not recorded.
pub(crate) const START_IT: &str = "start the program with memtrace: memtrace -- COMMAND";

/// A running recording.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Recording {
    /// The name of the session, by which the launcher is found again.
    session: String,
    /// The last answer of the launcher.
    pub(crate) answer: Answer,
}

/// The user's selection: a running recording, or one of its processes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Selected {
    pub(crate) recording: Recording,
    /// The selected process. `None` selects all.
    pub(crate) pid: Option<u32>,
}

impl Recording {
    /// The run folder.
    pub(crate) fn folder(&self) -> &Path {
        Path::new(&self.answer.folder)
    }

    /// Waits until all that the recorded processes have published before this call is in their trace files.
    ///
    /// Fails if the recording has ended or the launcher does not answer in time.
    pub(crate) fn write_out(&mut self) -> anyhow::Result<()> {
        let folder = self.folder().display().to_string();
        let ended = || WithHelp::new(format!("the recording in {folder} has ended"), read_it(&folder));
        self.answer = ask(&self.session, Request::WriteOut)?.ok_or_else(ended)?;
        Ok(())
    }
}

/// The running recordings of this user, by the process id of the launcher; of every user for root.
pub(crate) fn recordings() -> Vec<Recording> {
    let list = File::open("/proc/net/unix").map(BufReader::new);
    // Every user can listen under a name that is not UTF-8.
    let lines = list.into_iter().flat_map(|list| list.split(b'\n').map_while(Result::ok));
    let mut names: Vec<String> = lines.filter_map(|line| session(&String::from_utf8_lossy(&line))).collect();
    names.sort();
    // A connection that waits to be accepted is listed under the same name.
    names.dedup();
    let replies = inquiry::ask_all(&names, Request::Describe);
    // A launcher that is stopped or has just ended is left out.
    let described =
        |(session, reply)| if let Reply::Answer(answer) = reply { Some(Recording { session, answer }) } else { None };
    let mut recordings: Vec<Recording> = names.into_iter().zip(replies).filter_map(described).collect();
    recordings.sort_by_key(|recording| recording.answer.pid);
    recordings
}

/// The running recording that a PID or RUN argument names: the process id of a recorded process or of a launcher, a run
/// folder or a trace in it.
pub(crate) fn select(target: &str) -> anyhow::Result<Selected> {
    let path = Path::new(target);
    match target.parse::<u32>() {
        Ok(pid) if !path.exists() => by_pid(pid),
        _ => by_path(path),
    }
}

/// [`select`], or without an argument the only running recording of this user.
pub(crate) fn select_or_only(target: Option<&str>) -> anyhow::Result<Selected> {
    if let Some(target) = target {
        return select(target);
    }
    let mut all = recordings();
    match (all.pop(), all.len()) {
        (Some(recording), 0) => Ok(Selected { recording, pid: None }),
        (None, _) => bail!(WithHelp::new("no recording of this user runs on this machine", START_IT)),
        (Some(last), others) => {
            let folders = all.iter().chain([&last]).map(|one| format!("{} ({})", one.answer.pid, one.answer.folder));
            let folders: Vec<String> = folders.collect();
            let message = format!("{} recordings run: {}", others + 1, folders.join(", "));
            bail!(WithHelp::new(message, "name one by the process id or the run folder"));
        }
    }
}

fn by_pid(pid: u32) -> anyhow::Result<Selected> {
    for recording in recordings() {
        if recording.answer.pid == pid {
            return Ok(Selected { recording, pid: None });
        }
        if recording.answer.processes.iter().any(|process| process.pid == pid) {
            return Ok(Selected { recording, pid: Some(pid) });
        }
    }
    let process = ProcessDir::of(pid);
    if !process.file("").exists() {
        bail!(WithHelp::new(
            format!("no process has the id {pid}"),
            "list the running recordings: memtrace live --once"
        ));
    }
    if process.is_of_another_user() {
        let message = format!("process {pid} belongs to another user");
        bail!(WithHelp::new(message, "run this command as the user who started the recording, or as root"));
    }
    bail!(WithHelp::new(
        format!("memtrace records nothing of process {pid} now: it has not used GPU memory yet, or is not recorded"),
        format!("{START_IT}; to record a process that runs already: memtrace attach {pid}")
    ));
}

fn by_path(path: &Path) -> anyhow::Result<Selected> {
    let shown = path.display();
    let absolute = path.canonicalize().with_context(|| {
        WithHelp::new(format!("cannot open {shown}"), "pass the id of a recorded process, or the run folder")
    })?;
    let (folder, trace) = match absolute.file_name() {
        Some(name) if absolute.is_file() => (absolute.parent().unwrap_or(&absolute), Some(name.to_owned())),
        _ => (absolute.as_path(), None),
    };
    let is_of_folder = |recording: &Recording| recording.folder().canonicalize().is_ok_and(|one| one == folder);
    if let Some(recording) = recordings().into_iter().find(is_of_folder) {
        let of_trace =
            |name: &OsStr| recording.answer.processes.iter().find(|process| OsStr::new(&process.trace) == name);
        let pid = match trace {
            None => None,
            Some(name) => Some(of_trace(&name).with_context(|| ended(path)).map(|process| process.pid)?),
        };
        return Ok(Selected { recording, pid });
    }
    let manifest = RunFolder::open(folder).ok().and_then(|folder| Manifest::read(&folder).ok().flatten());
    match manifest.and_then(|manifest| manifest.state) {
        Some(RunState::Ended) => bail!(ended(path)),
        Some(RunState::Running) => bail!(WithHelp::new(
            format!("the recording in {shown} does not run on this machine; memtrace may have been killed"),
            read_it(shown)
        )),
        None => bail!(WithHelp::new(format!("{shown} is no run folder"), START_IT)),
    }
}

fn ended(path: &Path) -> WithHelp {
    WithHelp::new(format!("the recording in {} has ended", path.display()), read_it(path.display()))
}

/// How to read a recording that does not run.
pub(crate) fn read_it(path: impl std::fmt::Display) -> String {
    format!("read it with: memtrace report {path}")
}

/// The name of a session of this user in a line of `/proc/net/unix`.
fn session(line: &str) -> Option<String> {
    let name = line.rsplit(' ').next()?.strip_prefix("@memtrace-")?;
    let (uid, random) = name.split_once('-')?;
    let us = rustix::process::geteuid().as_raw();
    let is_ours = us == 0 || uid.parse() == Ok(us);
    (is_ours && is_token(random)).then(|| name.to_owned())
}

/// Asks the launcher of a session. `None` if there is none, or if it ends before it answers.
///
/// Fails if the launcher does not answer in time, and if another user listens under the name.
fn ask(session: &str, request: Request) -> anyhow::Result<Option<Answer>> {
    match inquiry::ask(session, request) {
        Reply::Answer(answer) => Ok(Some(answer)),
        Reply::Ended => Ok(None),
        Reply::OtherUser => bail!("another user listens under the name of this recording"),
        Reply::Silent(pid, limit) => {
            let process = pid.map(|pid| format!(" (process {pid})")).unwrap_or_default();
            bail!(WithHelp::new(
                format!("memtrace{process} does not answer within {} s", limit.as_secs()),
                "resume it if it is stopped: kill -CONT PID"
            ))
        }
        Reply::Unreadable(reason) => bail!("cannot read the answer of the recording's launcher: {reason}"),
    }
}

/// The path of the trace of a process that is being recorded. `None` if it is not.
pub(crate) fn trace_of(recording: &Recording, pid: u32) -> Option<PathBuf> {
    let process = recording.answer.processes.iter().find(|process| process.pid == pid)?;
    Some(recording.folder().join(&process.trace))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_of_this_user_are_found_by_their_names() {
        let us = rustix::process::geteuid().as_raw();
        let random = "0123456789abcdef0123456789abcdef";
        let line = |name: &str| format!("0000000000000000: 00000002 00000000 00010000 0001 01 12345 {name}");
        assert_eq!(session(&line(&format!("@memtrace-{us}-{random}"))), Some(format!("{us}-{random}")));
        for other in ["@memtrace-test", "@memtrace-0123", "/run/memtrace-0-x", "", "@memtrace-x-0123456789abcdef"] {
            assert_eq!(session(&line(other)), None, "{other}");
        }
        assert_eq!(session(&line(&format!("@memtrace-{us}-{}", &random[1..]))), None);
    }

    #[test]
    fn what_is_not_recorded_is_named() {
        let text = |target: &str| select(target).unwrap_err().to_string();
        let us = std::process::id();
        assert!(text(&us.to_string()).starts_with(&format!("memtrace records nothing of process {us} now")));
        let help = crate::message::help_of(&select(&us.to_string()).unwrap_err()).unwrap();
        assert!(help.ends_with(&format!("memtrace attach {us}")), "{help}");
        assert_eq!(text("4000000000"), "no process has the id 4000000000");
        let folder = tempfile::tempdir().unwrap();
        let shown = folder.path().display().to_string();
        assert_eq!(text(&shown), format!("{shown} is no run folder"));
        std::fs::write(folder.path().join("run.json"), r#"{"version": 2, "state": "ended"}"#).unwrap();
        assert_eq!(text(&shown), format!("the recording in {shown} has ended"));
        std::fs::write(folder.path().join("run.json"), r#"{"version": 2, "state": "running"}"#).unwrap();
        assert!(text(&shown).starts_with(&format!("the recording in {shown} does not run on this machine")));
        assert!(text(&format!("{shown}/missing")).starts_with("cannot open "));
    }
}
