//! The binary under test, programs compiled on the spot, and ways to watch processes without fixed delays. Shared by
//! the launcher's tests.
#![allow(dead_code, reason = "every test binary uses its part")]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;

use memtrace_trace::event::Event;
use memtrace_trace::file::Reader;
use serde_json::Value;

/// The binary under test: `MEMTRACE_BIN`, or the release build that `scripts/test` makes.
pub(crate) fn memtrace() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(memtrace_tests::traced_program::memtrace)
}

/// `memtrace --quiet -o FOLDER --`; the caller appends a command.
pub(crate) fn recording(folder: &Path) -> Command {
    let mut command = Command::new(memtrace());
    command.arg("--quiet").arg("-o").arg(folder).arg("--");
    command
}

/// The program that records without a GPU (`programs/launcher/producer.rs`).
pub(crate) const PRODUCER: &str = env!("CARGO_BIN_EXE_producer");

/// The path of a compiled C program of `programs/launcher`.
pub(crate) fn compiled(source: &str) -> &'static Path {
    static PROGRAMS: OnceLock<tempfile::TempDir> = OnceLock::new();
    static PROCESS_STATE: OnceLock<PathBuf> = OnceLock::new();
    assert_eq!(source, "process_state.c");
    PROCESS_STATE.get_or_init(|| {
        let folder = PROGRAMS.get_or_init(|| tempfile::tempdir().unwrap());
        let program = folder.path().join("process_state");
        compile(source, &program, &[]);
        program
    })
}

/// Compiles a C program of `programs/launcher`.
pub(crate) fn compile(source: &str, program: &Path, flags: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/launcher").join(source);
    let status = Command::new("cc").args(["-O1", "-Wall", "-o"]).arg(program).arg(source).args(flags).status().unwrap();
    assert!(status.success());
}

/// Runs the command to its end, without stdin.
pub(crate) fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap()
}

/// The text on stderr.
pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A running program whose stdout is read line by line.
pub(crate) struct Running {
    pub(crate) child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    /// Starts the command.
    pub(crate) fn start(command: &mut Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Running { child, lines }
    }

    /// The next line without its line end; empty at the end of stdout.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// All remaining lines up to an empty one or the end.
    pub(crate) fn rest(&mut self) -> Vec<String> {
        std::iter::from_fn(|| Some(self.line()).filter(|l| !l.is_empty())).collect()
    }

    /// The process id.
    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends a signal to the process.
    pub(crate) fn signal(&self, signal: i32) {
        kill(self.pid(), signal);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A failed test leaves no process running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A pseudoterminal: our end and the program's. It does not echo, because echo and program output would mix in any
/// order.
pub(crate) fn terminal() -> (File, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    // SAFETY: `ours` and `theirs` are live, writable integers during the call; `openpty` allows null for the rest.
    unsafe {
        assert_eq!(
            libc::openpty(&mut ours, &mut theirs, std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut()),
            0
        );
        libc::fcntl(ours, libc::F_SETFD, libc::FD_CLOEXEC);
        let mut settings = std::mem::zeroed();
        assert_eq!(libc::tcgetattr(theirs, &mut settings), 0);
        settings.c_lflag &= !libc::ECHO;
        assert_eq!(libc::tcsetattr(theirs, libc::TCSANOW, &settings), 0);
        (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs))
    }
}

/// Starts a command as a session leader with its own controlling terminal.
pub(crate) fn start_on(terminal: &OwnedFd, command: &mut Command) -> Child {
    let stdio = || Stdio::from(terminal.try_clone().unwrap());
    command.stdin(stdio()).stdout(stdio()).stderr(stdio());
    let fd = terminal.as_raw_fd();
    // SAFETY: between fork and exec the closure makes only system calls, which are async-signal-safe. It allocates
    // nothing.
    unsafe {
        command.pre_exec(move || {
            libc::setsid();
            // A script's background job ignores these two signals.
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            libc::signal(libc::SIGQUIT, libc::SIG_DFL);
            libc::ioctl(0, libc::TIOCSCTTY, 0);
            libc::close(fd);
            Ok(())
        })
    };
    command.spawn().unwrap()
}

/// `kill(2)`; a negative `pid` is a process group. Panics when it fails.
pub(crate) fn kill(pid: i32, signal: i32) {
    // SAFETY: `kill` takes two integers and touches no memory of this process. `pid` is a process that this test
    // started.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "kill({pid}, {signal})");
}

/// `waitpid(2)`; returns the status word.
pub(crate) fn wait(pid: i32, options: i32) -> i32 {
    let mut status = 0;
    // SAFETY: `status` is a live, writable `c_int` for the duration of the call.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, options) }, pid);
    status
}

/// The child processes of a process.
pub(crate) fn children(pid: i32) -> Vec<i32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().map(|p| p.parse().unwrap()).collect()
}

/// The parsed `run.json` of a run folder.
pub(crate) fn manifest(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("run.json")).unwrap()).unwrap()
}

/// The only process in the manifest.
pub(crate) fn only_process(folder: &Path) -> Value {
    let manifest = manifest(folder);
    let processes = manifest["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 1, "{manifest:#}");
    processes[0].clone()
}

/// The paths of a run's traces, sorted.
pub(crate) fn traces(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let mut traces: Vec<_> = entries.filter(|p| p.extension().is_some_and(|e| e == "mtr")).collect();
    traces.sort();
    traces
}

/// The only trace of a run.
pub(crate) fn only_trace(folder: &Path) -> Reader {
    let traces = traces(folder);
    assert_eq!(traces.len(), 1, "{traces:?}");
    Reader::open(&traces[0]).unwrap()
}

/// All events of a trace in file order.
pub(crate) fn events(reader: &Reader) -> Vec<Event> {
    let mut all = Vec::new();
    for block in reader.blocks() {
        let mut events = Vec::new();
        reader.decode(block, &mut events).unwrap();
        all.extend(events);
    }
    all
}

/// Waits until `condition` is true. Only the test harness's time limit ends the wait.
pub(crate) fn wait_for(mut condition: impl FnMut() -> bool) {
    while !condition() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
