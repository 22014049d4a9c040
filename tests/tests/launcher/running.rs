//! Commands that read a recording while it runs, from outside the traced process: `memtrace snapshot`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

use memtrace_tests::json_schema;
use memtrace_tests::traced_program::TracedProgram;
use serde_json::Value;

use crate::launcher_support::*;

/// A run in progress, whose program waits for lines on stdin.
struct Recorded {
    launcher: Running,
    folder: tempfile::TempDir,
}

impl Recorded {
    fn start(command: &mut Command, folder: tempfile::TempDir) -> Recorded {
        Recorded { launcher: Running::start(command.stdin(Stdio::piped()).stderr(Stdio::null())), folder }
    }

    /// The producer, which runs these words.
    fn producer(words: &[&str]) -> Recorded {
        let folder = tempfile::tempdir().unwrap();
        Recorded::start(recording(&folder.path().join("run")).arg(PRODUCER).args(words), folder)
    }

    /// The PyTorch program that prints its own figures.
    fn training() -> Recorded {
        let folder = tempfile::tempdir().unwrap();
        let command = TracedProgram::python("torch/live.py", &[]).prepare(Some(&folder.path().join("run")));
        Recorded::start(&mut { command }, folder)
    }

    fn run(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    /// The process id of the recorded program.
    fn pid(&self) -> u32 {
        // The launcher creates the file after the process has begun.
        wait_for(|| !traces(&self.run()).is_empty());
        traces(&self.run())[0].file_stem().unwrap().to_str().unwrap().parse().unwrap()
    }

    /// Lets the program go on.
    fn go_on(&mut self) {
        self.say("more");
    }

    /// Writes a line to the program.
    fn say(&mut self, line: &str) {
        self.launcher.child.stdin.as_mut().unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Ends the program, and waits until the launcher has ended.
    fn end(mut self) -> tempfile::TempDir {
        drop(self.launcher.child.stdin.take());
        self.launcher.child.wait().unwrap();
        self.folder
    }
}

/// `memtrace snapshot` with these arguments.
fn snapshot(arguments: &[&dyn AsRef<std::ffi::OsStr>]) -> Command {
    let mut command = Command::new(memtrace());
    command.arg("snapshot").args(arguments.iter().map(|argument| argument.as_ref()));
    command
}

#[track_caller]
fn succeeds(command: &mut Command) {
    let output = output(command);
    assert!(output.status.success(), "{}", stderr(&output));
}

/// The message of a command that fails.
#[track_caller]
fn fails(command: &mut Command) -> String {
    let output = output(command);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    stderr(&output)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_snapshot_has_every_event_that_was_published_before() {
    let mut recorded =
        Recorded::producer(&["threads=4", "events=1000", "write", "say=0", "wait", "write", "say=1", "wait"]);
    let out = recorded.folder.path().join("now.json");
    for turn in 0..2u64 {
        assert_eq!(recorded.launcher.line(), turn.to_string());
        let pid = recorded.pid().to_string();
        let launcher = recorded.launcher.pid().to_string();
        let run = recorded.run();
        for target in [Path::new(&pid), Path::new(&launcher), &run, &run.join(format!("{pid}.mtr"))] {
            succeeds(&mut snapshot(&[&target, &"-o", &out]));
            let summary = json(&out);
            assert_eq!(summary["run"]["events"], 4000 * (turn + 1), "{}", target.display());
            assert_eq!(summary["problems"], Value::Array(Vec::new()), "the recording goes on, which is no problem");
        }
        recorded.go_on();
    }
    let folder = recorded.end();
    assert_eq!(events(&only_trace(&folder.path().join("run"))).len(), 8000);
}

#[test]
fn a_snapshot_of_what_does_not_run_is_an_error_with_the_reason() {
    let mut recorded = Recorded::producer(&["events=10", "write", "say=ready", "wait"]);
    assert_eq!(recorded.launcher.line(), "ready");
    let (run, pid) = (recorded.run(), recorded.pid());
    let text = fails(&mut snapshot(&[&run, &"-o", &"now.unknown"]));
    assert!(text.contains("the ending of its name selects no format") && text.contains(".pickle"), "{text}");
    let text = fails(&mut snapshot(&[&std::process::id().to_string()]));
    assert!(text.contains("memtrace records nothing of process"), "{text}");
    let folder = recorded.end();
    let text = fails(&mut snapshot(&[&run]));
    assert!(text.contains("has ended\n") && text.contains("help: read it with: memtrace report"), "{text}");
    assert!(fails(&mut snapshot(&[&pid.to_string()])).contains("no process has the id"));
    // A launcher that was killed leaves a run folder that says that it runs.
    let mut killed = Recorded::producer(&["events=10", "write", "say=ready", "wait"]);
    assert_eq!(killed.launcher.line(), "ready");
    killed.launcher.signal(libc::SIGKILL);
    killed.launcher.child.wait().unwrap();
    assert!(fails(&mut snapshot(&[&killed.run()])).contains("memtrace may have been killed"));
    drop(folder);
}

#[test]
fn another_user_gets_nothing_and_leaves_no_trace() {
    // SAFETY: `geteuid` has no arguments and always succeeds.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED: only root can become another user: run this test as root, in a container for example");
        return;
    }
    let mut recorded = Recorded::producer(&["events=10", "write", "say=ready", "wait"]);
    assert_eq!(recorded.launcher.line(), "ready");
    let pid = recorded.pid().to_string();
    let others = tempfile::tempdir().unwrap();
    let binary = others.path().join("memtrace");
    std::fs::copy(memtrace(), &binary).unwrap();
    for path in [others.path(), &binary] {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let other = |arguments: &[&str]| {
        let mut command = Command::new(&binary);
        command.arg("snapshot").args(arguments).uid(65_534).gid(65_534).current_dir("/");
        fails(&mut command)
    };
    assert!(other(&[&pid]).contains(&format!("process {pid} belongs to another user")));
    assert!(other(&[]).contains("no recording of this user runs on this machine"));
    let folder = recorded.end();
    assert_eq!(manifest(&folder.path().join("run"))["refused"], serde_json::json!({}), "nobody has connected");
}

#[test]
fn a_snapshot_has_what_pytorch_counts() {
    let mut recorded = Recorded::training();
    let out = recorded.folder.path().join("now.json");
    for turn in 0..2 {
        let printed: Value = serde_json::from_str(&recorded.launcher.line()).unwrap();
        succeeds(&mut snapshot(&[&recorded.run(), &"-o", &out]));
        let device = &json(&out)["processes"][0]["devices"][0];
        assert_eq!(device["end"]["totals"]["allocated_bytes"], printed["allocated"], "turn {turn}");
        assert_eq!(device["end"]["totals"]["reserved_bytes"], printed["reserved"], "turn {turn}");
        recorded.go_on();
    }
    recorded.launcher.line();
    for (name, begins) in [("now.pickle", &b"\x80"[..]), ("now.html", b"<!DOCTYPE html>"), ("now.txt", b"")] {
        let path = recorded.folder.path().join(name);
        succeeds(&mut snapshot(&[&recorded.run(), &"-o", &path]));
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes.starts_with(begins) && bytes.len() > 200, "{name}");
    }
    recorded.end();
}

/// A snapshot command that waits for its trigger.
struct Waiting {
    child: Child,
    stderr: BufReader<ChildStderr>,
}

impl Waiting {
    /// Returns when the command has read the figures for the first time.
    fn start(arguments: &[&dyn AsRef<std::ffi::OsStr>]) -> Waiting {
        let mut child = snapshot(arguments).stderr(Stdio::piped()).spawn().unwrap();
        let mut waiting = Waiting { stderr: BufReader::new(child.stderr.take().unwrap()), child };
        assert_eq!(waiting.line(), "waiting for the trigger");
        waiting
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stderr.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn exit_code(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

#[test]
fn a_condition_and_an_interval_write_numbered_files() {
    let mut recorded = Recorded::producer(&["events=1000", "write", "say=ready", "wait"]);
    assert_eq!(recorded.launcher.line(), "ready");
    let at = |name: &str| recorded.folder.path().join(name);
    let run = recorded.run();
    succeeds(&mut snapshot(&[&run, &"--when", &"allocated > 1KiB", &"--count", &"1", &"-o", &at("high.json")]));
    assert_eq!(json(&at("high-1.json"))["run"]["events"], 1000);
    succeeds(&mut snapshot(&[&run, &"--every", &"1s", &"--count", &"2", &"-o", &at("now.json")]));
    assert!(at("now-1.json").exists() && at("now-2.json").exists() && !at("now.json").exists());
    let text = stderr(&output(&mut snapshot(&[&run, &"--when", &"allocated < 5"])));
    assert!(text.contains("expected allocated, reserved or used"), "{text}");
    // A condition that never holds is no success.
    let waiting = Waiting::start(&[&run, &"--when", &"allocated > 1TiB", &"-o", &at("never.json")]);
    let folder = recorded.end();
    assert_eq!(waiting.exit_code(), Some(1));
    assert!(!folder.path().join("never-1.json").exists());
}

#[test]
fn an_out_of_memory_error_writes_a_file() {
    let mut recorded = Recorded::training();
    recorded.launcher.line();
    let out = recorded.folder.path().join("oom.json");
    let mut waiting = Waiting::start(&[&recorded.run(), &"--on", &"oom", &"--count", &"1", &"-o", &out]);
    recorded.say("oom");
    assert_eq!(waiting.line(), format!("out-of-memory error in process {}", recorded.pid()));
    assert_eq!(waiting.exit_code(), Some(0));
    let device = json(&recorded.folder.path().join("oom-1.json"))["processes"][0]["devices"][0].clone();
    assert_eq!((&device["oom_count"], &device["ooms"][0]["requested_bytes"]), (&1.into(), &(1u64 << 47).into()));
    recorded.end();
}

/// The figures of `memtrace live --once --json`.
fn figures(target: &dyn AsRef<std::ffi::OsStr>) -> Value {
    let output = output(Command::new(memtrace()).args(["live", "--once", "--json"]).arg(target));
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn live_figures_are_those_of_pytorch_and_of_the_report() {
    let schema = json(&memtrace_tests::traced_program::root().join("analysis/schema/live.schema.json"));
    let mut recorded = Recorded::training();
    let out = recorded.folder.path().join("now.json");
    for turn in 0..3 {
        let printed: Value = serde_json::from_str(&recorded.launcher.line()).unwrap();
        let figures = figures(&recorded.run());
        json_schema::assert_valid(&schema, &figures);
        let process = &figures["recordings"][0]["processes"][0];
        assert_eq!(process["pid"], recorded.pid());
        let device = &process["devices"][0];
        assert_eq!(device["totals"]["allocated_bytes"], printed["allocated"], "turn {turn}");
        assert_eq!(device["totals"]["reserved_bytes"], printed["reserved"], "turn {turn}");
        succeeds(&mut snapshot(&[&recorded.run(), &"-o", &out]));
        let report = &json(&out)["processes"][0];
        let end = &report["devices"][0]["end"];
        assert_eq!(device["by_category"], end["by_category"], "turn {turn}");
        assert_eq!((&process["step"], &process["phase"]), (&end["step"], &end["phase"]), "turn {turn}");
        assert_eq!(device["stacks"][0]["bytes"], end["largest_allocations"][0]["bytes"], "turn {turn}");
        assert_eq!(device["stacks"][0]["location"], end["largest_allocations"][0]["stack"]["location"], "turn {turn}");
        let growth = &device["growth"];
        if turn == 0 {
            assert_eq!(growth["per_step_bytes"], Value::Null, "there were no steps");
        } else {
            assert_eq!(growth["per_step_bytes"], 4 << 20, "what the list keeps");
            assert!(growth["per_minute_bytes"].as_i64().unwrap() > 0 && growth["oom_in_ns"].as_u64().unwrap() > 0);
            let names: Vec<&str> =
                device["tensors"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
            assert!(names.contains(&"0.weight") && names.contains(&"Adam.exp_avg of 0.weight"), "{names:?}");
        }
        recorded.go_on();
    }
    let run = recorded.run();
    let text = output(Command::new(memtrace()).args(["live", "--once"]).arg(&run));
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("GPU 0: allocated ") && text.contains("growth +4.00 MiB/step"), "{text}");
    let folder = recorded.end();
    assert!(fails(Command::new(memtrace()).args(["live", "--once"]).arg(&run)).contains("has ended"));
    drop(folder);
}

#[test]
fn live_without_a_terminal_asks_for_once() {
    let text = fails(Command::new(memtrace()).arg("live").stdout(Stdio::null()));
    assert!(text.contains("memtrace live needs a terminal") && text.contains("add --once"), "{text}");
}
