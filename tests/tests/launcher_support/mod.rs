//! What the launcher's tests share: the binary, victims compiled on the spot, and ways to watch processes without waiting for
//! time.
#![allow(dead_code, reason = "every test binary uses its part")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;

use memtrace_trace::event::Event;
use memtrace_trace::file::Reader;
use serde_json::Value;

/// The binary under test: `MEMTRACE_BIN`, or the one of this build's profile, brought up to date by cargo.
pub(crate) fn memtrace() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("MEMTRACE_BIN") {
            return path.into();
        }
        // .../target/<profile>/deps/<this test>
        let test = std::env::current_exe().unwrap();
        let folder = test.ancestors().nth(2).unwrap();
        let profile = folder.file_name().and_then(OsStr::to_str).unwrap();
        let profile = if profile == "debug" { "dev" } else { profile };
        let status = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--package", "memtrace", "--profile", profile, "--target-dir"])
            .arg(folder.parent().unwrap())
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
            .status()
            .unwrap();
        assert!(status.success(), "memtrace does not build");
        folder.join("memtrace")
    })
}

/// `memtrace --quiet -o FOLDER --`, to be followed by a command.
pub(crate) fn recording(folder: &Path) -> Command {
    let mut command = Command::new(memtrace());
    command.arg("--quiet").arg("-o").arg(folder).arg("--");
    command
}

/// The program that records without a GPU (`programs/launcher/producer.rs`).
pub(crate) const PRODUCER: &str = env!("CARGO_BIN_EXE_producer");

/// A C program of `programs/launcher`, compiled.
pub(crate) fn compiled(source: &str) -> &'static Path {
    static PROGRAMS: OnceLock<tempfile::TempDir> = OnceLock::new();
    static VICTIM: OnceLock<PathBuf> = OnceLock::new();
    assert_eq!(source, "victim.c");
    VICTIM.get_or_init(|| {
        let folder = PROGRAMS.get_or_init(|| tempfile::tempdir().unwrap());
        let program = folder.path().join("victim");
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

/// Runs to the end.
pub(crate) fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap()
}

/// What was printed on stderr.
pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A running program whose stdout is read line by line.
pub(crate) struct Running {
    pub(crate) child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    /// Starts it.
    pub(crate) fn start(command: &mut Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Running { child, lines }
    }

    /// The next line; empty at the end.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// All lines to the end.
    pub(crate) fn rest(&mut self) -> Vec<String> {
        std::iter::from_fn(|| Some(self.line()).filter(|l| !l.is_empty())).collect()
    }

    /// The process id.
    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends a signal; a negative `to` means its process group.
    pub(crate) fn signal(&self, signal: i32) {
        kill(self.pid(), signal);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A test that failed leaves nothing running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `kill(2)`.
pub(crate) fn kill(pid: i32, signal: i32) {
    // SAFETY: a plain call on a process of this test.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "kill({pid}, {signal})");
}

/// `waitpid(2)`: the status word.
pub(crate) fn wait(pid: i32, options: i32) -> i32 {
    let mut status = 0;
    // SAFETY: a child of this process, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, options) }, pid);
    status
}

/// The children of a process.
pub(crate) fn children(pid: i32) -> Vec<i32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().map(|p| p.parse().unwrap()).collect()
}

/// `run.json` of a run.
pub(crate) fn manifest(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("run.json")).unwrap()).unwrap()
}

/// The only process of a run.
pub(crate) fn only_process(folder: &Path) -> Value {
    let manifest = manifest(folder);
    let processes = manifest["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 1, "{manifest:#}");
    processes[0].clone()
}

/// The traces of a run, by file name.
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

/// All events of a trace.
pub(crate) fn events(reader: &Reader) -> Vec<Event> {
    let mut all = Vec::new();
    for block in reader.blocks() {
        let mut events = Vec::new();
        reader.decode(block, &mut events).unwrap();
        all.extend(events);
    }
    all
}

/// Waits for something to become true; the test harness's own time limit is the only one.
pub(crate) fn wait_for(mut condition: impl FnMut() -> bool) {
    while !condition() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
