//! Runs the `memtrace` binary and reads its JSON.
//!
//! A call that is dropped, because the client cancelled it or left, kills the process that it waits for.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use memtrace_analysis::Summary;
use memtrace_analysis::load::Exit;
use serde::de::DeserializeOwned;
use std::os::unix::process::ExitStatusExt;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::sync::{OnceCell, Semaphore};

use crate::mcp::tool_error::ToolError;
use crate::supervisor;

/// The number of analyses at the same time. Each uses two cores.
const ANALYSES: usize = 2;
/// How long an analysis may take.
const ANALYSIS_TIME: Duration = Duration::from_secs(600);
/// The maximum size of the JSON of one analysis, in bytes.
const MAX_JSON: u64 = 256 << 20;
/// The number of bytes of messages that are read. The rest is discarded.
const MAX_MESSAGES: u64 = 64 << 10;
/// The number of summaries that are kept. An agent asks several questions about one run.
const KEPT_SUMMARIES: usize = 4;
/// The number of files of a run folder that identify its state.
const MAX_FILES: usize = 10_000;

/// The `memtrace` binary, and the summaries that it made.
#[derive(Debug)]
pub(crate) struct Memtrace {
    binary: PathBuf,
    analyses: Semaphore,
    kept: Mutex<VecDeque<(RunState, Arc<PendingSummary>)>>,
}

/// A summary, or the analysis that makes it.
type PendingSummary = OnceCell<Arc<Summary>>;

/// A run as its files were when it was read.
#[derive(PartialEq, Eq, Debug, Clone)]
struct RunState {
    path: PathBuf,
    files: Vec<(OsString, u64, Option<SystemTime>)>,
}

impl RunState {
    /// The state of a run folder, a trace or a snapshot.
    fn of(path: &Path) -> std::io::Result<RunState> {
        let path = path.canonicalize()?;
        let state = |name: OsString, data: std::fs::Metadata| (name, data.len(), data.modified().ok());
        let mut files = vec![state(OsString::new(), path.metadata()?)];
        if let Ok(entries) = path.read_dir() {
            let entries = entries.take(MAX_FILES).filter_map(Result::ok);
            files.extend(entries.filter_map(|entry| Some(state(entry.file_name(), entry.metadata().ok()?))));
        }
        files.sort();
        Ok(RunState { path, files })
    }
}

impl Memtrace {
    /// The binary at this path, or with this name on PATH.
    pub(crate) fn new(binary: PathBuf) -> Memtrace {
        Memtrace { binary, analyses: Semaphore::new(ANALYSES), kept: Mutex::default() }
    }

    /// A command line that begins with the binary. It has no input, and ends when it is dropped.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.binary);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    /// [`Self::command`], of which no process outlives it. It ends by SIGTERM.
    pub(crate) fn supervised(&self) -> Command {
        let mut command = Command::from(supervisor::command(&self.binary));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// The error of a binary that cannot be executed.
    pub(crate) fn cannot_execute(&self, e: &std::io::Error) -> ToolError {
        let text = format!("cannot execute {}: {e}", self.binary.display());
        ToolError::new(text, "install memtrace again, and start the server again")
    }

    /// The summary of a run. Calls for the same run share one analysis.
    pub(crate) async fn summary(&self, run: &Path) -> Result<Arc<Summary>, ToolError> {
        // The summary itself has the warnings, as `problems`.
        let analyze = async || Ok(Arc::new(self.json(&["report", "--json"], &[run.as_os_str()]).await?.0));
        // A run that cannot be identified is not kept. The analysis reports the error.
        let Ok(state) = RunState::of(run) else { return analyze().await };
        let cell = {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let position = kept.iter().position(|(other, _)| *other == state);
            let entry = position.and_then(|i| kept.remove(i)).unwrap_or_else(|| (state, Arc::default()));
            let cell = Arc::clone(&entry.1);
            kept.push_front(entry);
            kept.truncate(KEPT_SUMMARIES);
            cell
        };
        cell.get_or_try_init(analyze).await.map(Arc::clone)
    }

    /// Runs a reading command, and returns the JSON that it printed and its warnings. `paths` cannot be mistaken for
    /// options.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        options: &[&str],
        paths: &[&OsStr],
    ) -> Result<(T, Vec<String>), ToolError> {
        // The semaphore is never closed.
        let _turn = self.analyses.acquire().await;
        let mut command = self.command();
        command.args(options).arg("--").args(paths);
        let mut child = command.spawn().map_err(|e| self.cannot_execute(&e))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let work = async {
            let (json, messages) = tokio::join!(read(stdout, MAX_JSON), read(stderr, MAX_MESSAGES));
            (child.wait().await, json, messages)
        };
        let name = options.first().copied().unwrap_or_default();
        let Ok((status, json, messages)) = tokio::time::timeout(ANALYSIS_TIME, work).await else {
            let text = format!("memtrace {name} took longer than {} s", ANALYSIS_TIME.as_secs());
            return Err(ToolError::new(text, "run it in a shell"));
        };
        let status = status.map_err(|e| self.cannot_execute(&e))?;
        let messages = String::from_utf8_lossy(&messages.0);
        if !status.success() {
            return Err(ToolError::from_messages(&messages, &ending(status)));
        }
        if json.1 {
            let text = format!("memtrace {name} printed more than {} MiB", MAX_JSON >> 20);
            return Err(ToolError::new(text, "select a rank or a device"));
        }
        let value = serde_json::from_slice(&json.0).map_err(|e| {
            let text = format!("cannot read the JSON of {} {name}: {e}", self.binary.display());
            ToolError::new(text, "start the server again: memtrace was updated while it ran")
        })?;
        Ok((value, messages.lines().filter_map(|line| line.strip_prefix("warning: ")).map(str::to_owned).collect()))
    }
}

/// A word of a command line for a shell.
pub(crate) fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-+=/:,@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// How a process ended, as text.
pub(crate) fn ending(status: ExitStatus) -> String {
    Exit::from_wait_status(status.into_raw()).text().unwrap_or_default()
}

/// Reads a stream to its end, keeps the first bytes, and returns whether there were more.
async fn read(stream: Option<impl AsyncRead + Unpin>, max: u64) -> (Vec<u8>, bool) {
    let mut bytes = Vec::new();
    let Some(mut stream) = stream else { return (bytes, false) };
    // A stream that fails has ended.
    let _ = (&mut stream).take(max).read_to_end(&mut bytes).await;
    let more = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await.unwrap_or(0);
    (bytes, more > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_run_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let before = RunState::of(folder.path()).unwrap();
        assert_eq!(before, RunState::of(folder.path()).unwrap());
        std::fs::write(folder.path().join("1.mtr"), "a").unwrap();
        let with_file = RunState::of(folder.path()).unwrap();
        assert_ne!(before, with_file);
        std::fs::write(folder.path().join("1.mtr"), "ab").unwrap();
        assert_ne!(with_file, RunState::of(folder.path()).unwrap());
        RunState::of(&folder.path().join("none")).unwrap_err();
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!((shell_word("a/b-1.mtr"), shell_word("a b")), ("a/b-1.mtr".to_owned(), "'a b'".to_owned()));
        assert_eq!((shell_word("it's"), shell_word("")), (r"'it'\''s'".to_owned(), "''".to_owned()));
    }

    #[test]
    fn endings_have_names() {
        assert_eq!(ending(ExitStatus::from_raw(9)), "killed by SIGKILL");
        assert_eq!(ending(ExitStatus::from_raw(2 << 8)), "exit status 2");
    }
}
