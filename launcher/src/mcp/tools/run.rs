//! The tool `run`: records a command. Only with `--allow-run`. `dry_run` records through [`record`] too.
//!
//! The command runs in a task of its own. It ends with the command, at the time limit, or when nobody waits for it any
//! more. Then the command gets SIGTERM, so that memtrace writes what it recorded, and later its processes get SIGKILL.
//! None of its processes outlives it ([`supervisor`]).

use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rmcp::RoleServer;
use rmcp::model::{CallToolResult, ProgressNotificationParam};
use rmcp::service::RequestContext;
use rustix::process::{Pid, Signal, kill_process};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{Mutex, watch};

use super::arguments::{CommandLine, NewRunFolder, TimeoutSeconds};
use super::runs::RunRow;
use crate::inherited;
use crate::mcp::answer::{Shape, fit};
use crate::mcp::command::{Memtrace, ending};
use crate::mcp::tool_error::ToolError;
use crate::supervisor;

/// How long a command may run by default, and at most.
const TIME_LIMIT: (Duration, Duration) = (Duration::from_secs(600), Duration::from_secs(24 * 3600));
/// The number of bytes of output that are kept: more than an answer shows.
const KEPT_OUTPUT: usize = 16 << 10;
/// How long output is read after memtrace ended. A process that outlives it may keep the stream open.
const LAST_OUTPUT: Duration = Duration::from_millis(500);
/// How often a client that asked for it hears that the command still runs.
const PROGRESS: Duration = Duration::from_secs(5);

#[derive(Deserialize, JsonSchema, Debug)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arguments {
    command: CommandLine,
    timeout_seconds: Option<TimeoutSeconds>,
    folder: Option<NewRunFolder>,
    /// Record which Python objects hold the tensors. Default: false.
    holders: Option<bool>,
    /// Record the objects of reference cycles that held tensors. Default: false.
    cycles: Option<bool>,
}

/// A recorded command.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Content {
    /// How the command ended: `exit status N` or `signal N`.
    exit: String,
    /// Whether the time limit ended it.
    timed_out: bool,
    /// How long it took, in seconds, with the report.
    seconds: f64,
    /// The run. `run.run` is the argument of the other tools.
    run: RunRow,
    /// The end of what the command wrote to stdout.
    stdout_tail: String,
    /// The end of what the command and memtrace wrote to stderr.
    stderr_tail: String,
}

/// A command to record.
#[derive(Debug)]
pub(super) struct Request {
    /// The subcommand of memtrace that records, with its options.
    pub(super) recorder: Vec<String>,
    pub(super) command: CommandLine,
    pub(super) timeout_seconds: Option<TimeoutSeconds>,
    pub(super) folder: Option<NewRunFolder>,
}

/// The runs in progress: at most one, because runs would share the GPU.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    one: Arc<Mutex<()>>,
    is_over: watch::Sender<bool>,
}

impl Running {
    pub(crate) fn new() -> Running {
        Running { one: Arc::default(), is_over: watch::Sender::new(false) }
    }

    /// Reports that the client left.
    pub(crate) fn client_left(&self) {
        self.is_over.send_replace(true);
    }

    /// Waits until the client left.
    pub(crate) async fn over(&self) {
        // The sender is alive: it is part of this structure.
        let _ = self.is_over.subscribe().wait_for(|is_over| *is_over).await;
    }

    /// Ends the run in progress, and waits for it.
    pub(crate) async fn end(&self, limit: Duration) {
        self.client_left();
        let _ = tokio::time::timeout(limit, self.one.lock()).await;
    }
}

/// How a command ended.
struct Ended {
    status: std::process::ExitStatus,
    timed_out: bool,
    seconds: f64,
    stdout: Tail,
    stderr: Tail,
}

/// Answers a call.
pub(crate) async fn call(
    memtrace: &Memtrace,
    running: &Running,
    arguments: Arguments,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResult, ToolError> {
    let Arguments { command, timeout_seconds, folder, holders, cycles } = arguments;
    let options = [("--holders", holders), ("--cycles", cycles)];
    let options = options.into_iter().filter(|(_, is_set)| is_set.unwrap_or(false)).map(|(name, _)| name.to_owned());
    let recorder = std::iter::once("run".to_owned()).chain(options).collect();
    record(memtrace, running, Request { recorder, command, timeout_seconds, folder }, context).await
}

/// Records a command, and answers with its run.
pub(super) async fn record(
    memtrace: &Memtrace,
    running: &Running,
    request: Request,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResult, ToolError> {
    let Request { recorder, command: CommandLine(command), timeout_seconds, folder } = request;
    if command.first().is_none_or(String::is_empty) {
        return Err(ToolError::new("the command is empty", "pass the program and its arguments as a list"));
    }
    let folder = match folder {
        Some(NewRunFolder(folder)) => below_working_folder(folder)?,
        None => default_folder(&command),
    };
    // Its run would be taken for that of the command.
    if folder.read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
        let text = format!("cannot use {} as the run folder: it is not empty", folder.display());
        return Err(ToolError::new(text, "choose another folder, or leave out folder"));
    }
    let Ok(turn) = Arc::clone(&running.one).try_lock_owned() else {
        return Err(ToolError::new("another run is in progress", "wait for its answer, or cancel it"));
    };
    let limit =
        timeout_seconds.map_or(TIME_LIMIT.0, |TimeoutSeconds(seconds)| Duration::from_secs(seconds)).min(TIME_LIMIT.1);

    let mut recording = memtrace.supervised();
    inherited::restore_umask(recording.as_std_mut());
    recording.args(recorder).arg("--quiet").arg("-o").arg(&folder).arg("--").args(&command);
    // It ends by SIGTERM, not by being dropped.
    let child = recording.kill_on_drop(false).spawn().map_err(|e| memtrace.cannot_execute(&e))?;

    // Its end is requested by dropping the sender: this call was cancelled, or the client left.
    let (waits, nobody_waits) = watch::channel(());
    let task = tokio::spawn(async move {
        let _turn = turn;
        wait(child, limit, nobody_waits).await
    });
    let progress = report_progress(context);
    tokio::pin!(task, progress);
    let ended = tokio::select! {
        ended = &mut task => ended,
        () = &mut progress => task.await,
    };
    drop(waits);
    let ended = match ended {
        Ok(Ok(ended)) => ended,
        Ok(Err(e)) => return Err(memtrace.cannot_execute(&e)),
        Err(e) => return Err(ToolError::new(format!("the run failed: {e}"), "report this")),
    };

    let Some(run) = RunRow::read(&folder) else {
        return Err(ToolError::from_messages(&ended.stderr.text(), &ending(ended.status)));
    };
    let everything = "pass a command that writes its output into a file".to_owned();
    fit((None, None), &everything, |shape| Content {
        exit: ending(ended.status),
        timed_out: ended.timed_out,
        seconds: ended.seconds,
        run: run.shown(shape),
        stdout_tail: ended.stdout.shown("stdout_tail", shape),
        stderr_tail: ended.stderr.shown("stderr_tail", shape),
    })
}

/// Reports progress for as long as it is polled, if the client asked for it. Clients then wait longer for the answer.
async fn report_progress(context: &RequestContext<RoleServer>) {
    let Some(token) = context.meta.get_progress_token() else { return std::future::pending().await };
    let start = Instant::now();
    loop {
        tokio::time::sleep(PROGRESS).await;
        let seconds = start.elapsed().as_secs_f64().round();
        let message = format!("the command has been running for {seconds} s");
        let progress = ProgressNotificationParam::new(token.clone(), seconds).with_message(message);
        // A client that left hears nothing.
        let _ = context.peer.notify_progress(progress).await;
    }
}

/// Waits for a command, and ends it at the time limit or when nobody waits for it.
async fn wait(
    mut child: tokio::process::Child,
    limit: Duration,
    mut nobody_waits: watch::Receiver<()>,
) -> std::io::Result<Ended> {
    let start = Instant::now();
    let (stdout, stderr) = (Output::of(child.stdout.take()), Output::of(child.stderr.take()));
    let mut timed_out = false;
    let early = tokio::select! {
        status = child.wait() => Some(status?),
        () = tokio::time::sleep(limit) => { timed_out = true; None }
        // It ends with an error when the sender is dropped.
        _ = nobody_waits.changed() => None,
    };
    let status = match early {
        Some(status) => status,
        None => end(&mut child).await?,
    };
    let seconds = (start.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    let (stdout, stderr) = tokio::join!(stdout.finish(), stderr.finish());
    Ok(Ended { status, timed_out, seconds, stdout, stderr })
}

/// Asks the supervisor to end the run, and waits for that.
async fn end(child: &mut tokio::process::Child) -> std::io::Result<std::process::ExitStatus> {
    let Some(supervisor) = child.id().and_then(|pid| Pid::from_raw(pid as i32)) else { return child.wait().await };
    let _ = kill_process(supervisor, Signal::TERM);
    if let Ok(status) = tokio::time::timeout(supervisor::END_TIME, child.wait()).await {
        return status;
    }
    child.start_kill()?;
    child.wait().await
}

/// The end of a stream.
#[derive(Default, Clone, Debug)]
struct Tail {
    bytes: Vec<u8>,
    total: u64,
}

/// A stream that is read to its end in a task of its own.
struct Output {
    tail: Arc<std::sync::Mutex<Tail>>,
    task: tokio::task::JoinHandle<()>,
}

impl Output {
    fn of(stream: Option<impl AsyncRead + Send + Unpin + 'static>) -> Output {
        let tail = Arc::new(std::sync::Mutex::new(Tail::default()));
        let shared = Arc::clone(&tail);
        let task = tokio::spawn(async move {
            let Some(mut stream) = stream else { return };
            let mut buffer = [0; 4096];
            while let Ok(length) = stream.read(&mut buffer).await
                && length > 0
            {
                shared.lock().unwrap_or_else(PoisonError::into_inner).push(&buffer[..length]);
            }
        });
        Output { tail, task }
    }

    /// The output that was read, also if another process keeps the stream open.
    async fn finish(mut self) -> Tail {
        if tokio::time::timeout(LAST_OUTPUT, &mut self.task).await.is_err() {
            self.task.abort();
        }
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Tail {
    fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        self.bytes.extend_from_slice(bytes);
        let more = self.bytes.len().saturating_sub(KEPT_OUTPUT);
        self.bytes.drain(..more);
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// The part that fits into an answer.
    fn shown(&self, name: &str, shape: &Shape) -> String {
        shape.tail(name, &self.text(), self.total)
    }
}

/// The folder, if it is below the working folder.
fn below_working_folder(folder: PathBuf) -> Result<PathBuf, ToolError> {
    let fail = || {
        let text = format!("cannot write into {}: it is not below the working folder of the server", folder.display());
        ToolError::new(text, "pass a relative path without `..`, or leave out folder")
    };
    let is_below = folder.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    let has_name = folder.components().any(|part| matches!(part, Component::Normal(_)));
    let here = Path::new(".").canonicalize().map_err(|_| fail())?;
    // A symbolic link may lead out of the working folder.
    let existing = folder.ancestors().find_map(|path| match path.as_os_str().is_empty() {
        true => Some(here.clone()),
        false => path.symlink_metadata().ok().map(|_| path.canonicalize().unwrap_or_default()),
    });
    if is_below && has_name && existing.is_some_and(|path| path.starts_with(&here)) { Ok(folder) } else { Err(fail()) }
}

/// A new folder, named after the program and the time.
fn default_folder(command: &[String]) -> PathBuf {
    let script = command.iter().find(|argument| argument.ends_with(".py")).or(command.first());
    let name = script.and_then(|program| Path::new(program).file_stem()).unwrap_or_default().to_string_lossy();
    let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).take(48).collect();
    let time: String = humantime::format_rfc3339_seconds(SystemTime::now())
        .to_string()
        .chars()
        .filter_map(|c| match c {
            'T' => Some('-'),
            _ => c.is_ascii_digit().then_some(c),
        })
        .collect();
    let folders = (1..).map(|i| match i {
        1 => PathBuf::from(format!("memtrace-{name}-{time}")),
        _ => PathBuf::from(format!("memtrace-{name}-{time}-{i}")),
    });
    folders.into_iter().find(|folder| folder.symlink_metadata().is_err()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_folders_are_below_the_working_folder() {
        for folder in ["a", "a/b", "./a"] {
            assert_eq!(below_working_folder(folder.into()).unwrap(), PathBuf::from(folder));
        }
        for folder in ["", ".", "/tmp/a", "../a", "a/../../b", "a/.."] {
            below_working_folder(folder.into()).unwrap_err();
        }
    }

    #[test]
    fn the_default_folder_has_the_name_of_the_script() {
        let folder = |line: &[&str]| default_folder(&line.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
        assert!(folder(&["python", "x/train.py", "--lr"]).to_str().unwrap().starts_with("memtrace-train-20"));
        assert!(folder(&["./a b"]).to_str().unwrap().starts_with("memtrace-a_b-20"));
    }

    #[test]
    fn the_end_of_output_is_kept() {
        let mut tail = Tail::default();
        (0..10_000).for_each(|i| tail.push(format!("line {i}\n").as_bytes()));
        assert_eq!(tail.bytes.len(), KEPT_OUTPUT);
        assert!(tail.text().ends_with("line 9999\n"));
        assert_eq!(tail.total, (0..10_000).map(|i| format!("line {i}\n").len() as u64).sum::<u64>());
    }
}
