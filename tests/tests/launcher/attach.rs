//! `memtrace attach`: records a process that was started without memtrace.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};

use memtrace_tests::traced_program::TracedProgram;
use memtrace_tests::tracee::{Follow, Tracee};
use memtrace_tests::versions::Versions;
use memtrace_trace::event::{Action, Event, Flags, Source};
use serde_json::Value;

use crate::launcher_support::*;

/// A PyTorch program without memtrace, which does what lines on stdin ask for.
pub(super) struct Program(pub(super) Running);

impl Program {
    fn start(arguments: &[&str]) -> Program {
        Program::begin(TracedProgram::python("attach/training.py", arguments))
    }

    pub(super) fn begin(traced: TracedProgram) -> Program {
        let mut command = traced.prepare(None);
        let mut program = Program(Running::start(command.stdin(Stdio::piped())));
        assert_eq!(program.0.line(), "ready");
        program
    }

    pub(super) fn ask(&mut self, line: &str) -> String {
        self.0.child.stdin.as_mut().unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
        self.0.line()
    }

    fn state(&mut self) -> Value {
        serde_json::from_str(&self.ask("state")).unwrap()
    }

    /// Ends the program. Returns the last line, which has its result.
    fn stop(mut self) -> String {
        let result = self.ask("stop");
        assert!(self.0.child.wait().unwrap().success());
        result
    }
}

/// A running `memtrace attach`.
pub(super) struct Attached {
    pub(super) child: Child,
    stderr: BufReader<ChildStderr>,
    /// The first line that was printed.
    line: String,
}

/// `memtrace attach` into a folder.
pub(super) fn attach(pid: i32, folder: &Path) -> Command {
    let mut command = Command::new(memtrace());
    command.args(["attach", "--no-device-usage", "--cpu", "never", "-o"]).arg(folder).arg(pid.to_string());
    memtrace_tests::traced_program::with_default_signals(&mut command);
    command
}

impl Attached {
    pub(super) fn begin(pid: i32, folder: &Path) -> Attached {
        Attached::spawn(attach(pid, folder))
    }

    fn spawn(mut command: Command) -> Attached {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Attached { child, stderr, line: String::new() }
    }

    /// Attaches, and waits until the process is recorded. `None` where the kernel does not permit to trace.
    pub(super) fn start(pid: i32, folder: &Path) -> Option<Attached> {
        Attached::begin(pid, folder).started(pid)
    }

    /// [`Self::start`] with a command for it.
    pub(super) fn of(command: Command, pid: i32) -> Option<Attached> {
        Attached::spawn(command).started(pid)
    }

    /// Waits until the process is recorded. `None` where the kernel does not permit to trace.
    pub(super) fn started(mut self, pid: i32) -> Option<Attached> {
        let mut line = String::new();
        self.stderr.read_line(&mut line).unwrap();
        if line.contains("the kernel") && line.contains("permit") {
            println!("SKIPPED: {line}");
            self.child.wait().unwrap();
            return None;
        }
        assert!(line.starts_with(&format!("attached to process {pid}: ")), "{line}");
        self.line = line;
        Some(self)
    }

    /// Waits for the end of the recording. Returns what was printed.
    fn finish(mut self) -> String {
        let mut text = String::new();
        self.stderr.read_to_string(&mut text).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {text}");
        text
    }

    /// Detaches by a signal.
    pub(super) fn detach(self) -> String {
        kill(self.child.id() as i32, libc::SIGINT);
        self.finish()
    }
}

/// The blocks in use and the reserved bytes at the end of a recording: address, size and requested size, sorted.
fn end_state(events: &[Event]) -> (Vec<(u64, u64, u64)>, u64) {
    let (mut blocks, mut reserved) = (BTreeMap::new(), 0);
    for event in events.iter().filter(|event| event.source == Source::Torch) {
        match event.action {
            Action::Alloc => {
                assert!(event.flags.contains(Flags::SLACK_KNOWN), "{event:?}");
                let size = event.size + u64::from(event.slack);
                assert_eq!(blocks.insert(event.addr, (size, event.size)), None, "{event:?}");
            }
            Action::FreeRequested => assert!(blocks.remove(&event.addr).is_some(), "{event:?}"),
            Action::SegmentAlloc | Action::SegmentMap => reserved += event.size,
            Action::SegmentFree | Action::SegmentUnmap => reserved -= event.size,
            _ => {}
        }
    }
    (blocks.into_iter().map(|(addr, (size, requested))| (addr, size, requested)).collect(), reserved)
}

fn blocks_of(state: &Value) -> Vec<(u64, u64, u64)> {
    serde_json::from_value(state["blocks"].clone()).unwrap()
}

/// Whether Python has `sys.remote_exec`.
fn loads_the_library_itself(versions: Versions) -> bool {
    let program = ["python", "-c", "import sys; print(hasattr(sys, 'remote_exec'))"];
    let output = TracedProgram::command(&program).over_simcuda().on(versions).run_alone();
    assert!(output.status.success(), "{}", stderr(&output));
    output.stdout.starts_with(b"True")
}

fn has_the_blocks_that_were_there_and_those_that_follow(versions: Versions) {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut program = Program::begin(TracedProgram::python("attach/training.py", &["4", "pool"]).on(versions));
    let Some(attached) = Attached::start(program.0.pid(), &run) else { return };
    for _ in 0..5 {
        assert_eq!(program.ask("step"), "stepped");
    }
    let state = program.state();
    let text = attached.detach();
    let process = only_process(&run);
    assert_eq!((&process["end_reason"], &process["lost"]), (&"detached".into(), &0.into()), "{process:#}\n{text}");
    assert_eq!(process["counters"].get("reporter_mismatches"), None, "{process:#}");
    let events = events(&only_trace(&run));
    let (blocks, reserved) = end_state(&events);
    assert_eq!((blocks, reserved), (blocks_of(&state), state["reserved"].as_u64().unwrap()));
    let is_before = |event: &&Event| event.flags.contains(Flags::PREEXISTING);
    let before = events.iter().filter(is_before).count();
    assert!(before > 20 && events[..before].iter().all(|event| is_before(&event)), "{before}");
    // Later events have stacks and autograd nodes, as in any other recording.
    let later =
        || events[before..].iter().filter(|event| event.source == Source::Torch && event.action == Action::Alloc);
    let is_attributed = |event: &Event| !event.stack.is_none() || !event.context.is_none();
    assert!(later().count() > 50 && later().all(is_attributed));
    assert!(later().any(|event| event.flags.contains(Flags::IN_BACKWARD)));
    let summary: Value = serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap();
    let end = &summary["processes"][0]["devices"][0]["end"];
    let totals = (&end["totals"]["allocated_bytes"], &end["totals"]["reserved_bytes"]);
    assert_eq!(totals, (&state["allocated"], &state["reserved"]), "{end:#}");
    let limits = summary["not_recorded"][0]["text"].as_str().unwrap();
    assert!(limits.starts_with("memtrace attached ") && limits.contains("has no call stack"), "{limits}");
    // Python 3.14 and newer stop no thread for it.
    let was_stopped = manifest(&run)["attached"]["stopped_ns"].as_u64().map(|ns| ns > 0);
    assert_eq!(was_stopped, (!loads_the_library_itself(versions)).then_some(true));
    program.stop();
}

#[test]
fn the_recording_has_the_blocks_that_were_there_and_those_that_follow() {
    has_the_blocks_that_were_there_and_those_that_follow(Versions::DEFAULT);
}

#[test]
fn so_has_that_of_a_python_that_cannot_load_the_library_itself() {
    has_the_blocks_that_were_there_and_those_that_follow(Versions::ON_GPUS);
}

#[test]
fn after_detaching_the_process_is_as_before_and_can_be_attached_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut alone = Program::start(&[]);
    (0..6).for_each(|_| drop(alone.ask("step")));
    let expected = alone.stop();
    let mut program = Program::start(&[]);
    let before = program.state();
    for turn in 0..3 {
        let run = folder.path().join(format!("run{turn}"));
        let Some(attached) = Attached::start(program.0.pid(), &run) else { return };
        program.ask("step");
        let during = program.state();
        attached.detach();
        let (blocks, reserved) = end_state(&events(&only_trace(&run)));
        assert_eq!((blocks, reserved), (blocks_of(&during), during["reserved"].as_u64().unwrap()), "attachment {turn}");
        program.ask("step");
        let after = program.state();
        for what in ["threads", "files", "shared"] {
            assert_eq!(after[what], before[what], "{what} after attachment {turn}");
        }
    }
    assert_eq!(program.stop(), expected);
}

#[test]
fn each_device_has_its_own_state() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut command = TracedProgram::python("attach/devices.py", &[]).env("SIMCUDA_DEVICES", "3").prepare(None);
    let mut program = Program(Running::start(command.stdin(Stdio::piped())));
    assert_eq!(program.0.line(), "ready");
    let Some(attached) = Attached::start(program.0.pid(), &run) else { return };
    let state: Vec<(u64, u64, u64)> = serde_json::from_str(&program.ask("state")).unwrap();
    assert_eq!(state.len(), 3);
    attached.detach();
    let summary: Value = serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap();
    // A backward pass may have been running whose forward pass is not recorded.
    let losses = summary["losses"].as_object().unwrap();
    assert!(losses.keys().all(|loss| loss == "forward_stacks_lost"), "{losses:?}");
    let devices = summary["processes"][0]["devices"].as_array().unwrap();
    for (number, (allocated, reserved, blocks)) in state.into_iter().enumerate() {
        let end = &devices.iter().find(|device| device["device"] == number).unwrap()["end"];
        let counted: u64 =
            end["by_category"].as_array().unwrap().iter().map(|category| category["blocks"].as_u64().unwrap()).sum();
        let totals = [&end["totals"]["allocated_bytes"], &end["totals"]["reserved_bytes"]];
        assert_eq!(totals.map(|bytes| bytes.as_u64().unwrap()), [allocated, reserved], "GPU {number}");
        assert_eq!(counted, blocks, "GPU {number}");
    }
    assert_eq!(program.ask("state"), "running");
    assert_eq!(program.ask("stop"), "stopped");
}

#[test]
fn a_recording_ends_with_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut program = Program::start(&[]);
    let Some(attached) = Attached::start(program.0.pid(), &run) else { return };
    program.ask("step");
    program.stop();
    let text = attached.finish();
    let process = only_process(&run);
    assert_eq!((&process["end_reason"], &process["lost"]), (&"exited".into(), &0.into()), "{process:#}\n{text}");
}

#[test]
fn the_process_survives_the_end_of_memtrace_at_any_time() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = Program::start(&["2"]);
    let Some(attached) = Attached::start(program.0.pid(), &folder.path().join("run")) else { return };
    program.ask("step");
    let mut child = attached.child;
    child.kill().unwrap();
    child.wait().unwrap();
    program.ask("step");
    // The library notices the end and restores everything, so the process can be attached again.
    let state = |program: &mut Program| program.state()["threads"].to_string();
    wait_for(|| !state(&mut program).contains("memtrace"));
    // It waits for a thread that runs Python: the main thread has not run its script, or is traced.
    let mut program = Program::start(&[]);
    assert_eq!(program.ask("sleep 3"), "sleeping");
    let mut waiting = Attached::begin(program.0.pid(), &folder.path().join("waiting"));
    wait_for(|| !children(waiting.child.id() as i32).is_empty());
    std::thread::sleep(std::time::Duration::from_millis(300));
    waiting.child.kill().unwrap();
    assert_eq!(waiting.child.wait().unwrap().signal(), Some(libc::SIGKILL));
    assert_eq!(program.0.line(), "awake");
    program.stop();
}

#[test]
fn what_cannot_be_recorded_is_an_error_with_a_fix_and_leaves_no_folder() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let fails = |pid: i32| {
        let output = output(&mut attach(pid, &run));
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.starts_with("error: ") && text.contains("\nhelp: "), "{text}");
        assert!(!run.exists(), "{text}");
        text
    };
    assert!(fails(i32::MAX).contains("there is no process"));
    let mut sleep = Running::start(Command::new("sleep").arg("600"));
    wait_for(|| std::fs::read_link(format!("/proc/{}/exe", sleep.pid())).is_ok_and(|exe| !exe.ends_with("launcher")));
    let text = fails(sleep.pid());
    assert!(text.contains("it does not run CPython"), "{text}");
    let tracer = Tracee::seize(sleep.pid(), Follow::Nothing);
    assert!(fails(sleep.pid()).contains(" traces it\n"));
    drop(tracer);
    sleep.child.kill().unwrap();
    let mut python = TracedProgram::command(&["python", "-c", "print('ready', flush=True); input()"]).prepare(None);
    let mut python = Running::start(python.stdin(Stdio::piped()));
    assert_eq!(python.line(), "ready");
    assert!(fails(python.pid()).contains("it has not imported PyTorch"));
    let program = Program::start(&[]);
    let other = folder.path().join("other");
    let Some(attached) = Attached::start(program.0.pid(), &other) else { return };
    assert!(fails(program.0.pid()).contains(&format!("memtrace (process {}) records it already", attached.child.id())));
    attached.detach();
    program.0.signal(libc::SIGSTOP);
    wait_for(|| std::fs::read_to_string(format!("/proc/{}/status", program.0.pid())).unwrap().contains("State:\tT"));
    assert!(fails(program.0.pid()).contains("it is stopped"));
    program.0.signal(libc::SIGCONT);
    program.stop();
}

#[test]
fn a_recent_python_loads_the_library_itself_if_its_main_thread_runs() {
    if !loads_the_library_itself(Versions::DEFAULT) {
        println!("SKIPPED: Python is older than 3.14");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut program = Program::start(&["4"]);
    let scripts = || {
        let all = std::fs::read_dir(std::env::temp_dir()).unwrap().map(|one| one.unwrap().file_name());
        all.filter(|name| name.to_string_lossy().starts_with("memtrace-attach-")).count()
    };
    for turn in 0..3 {
        let run = folder.path().join(format!("run{turn}"));
        let is_asleep = turn == 1;
        if is_asleep {
            assert_eq!(program.ask("sleep 12"), "sleeping");
        }
        let Some(attached) = Attached::start(program.0.pid(), &run) else { return };
        // While the main thread sleeps, others run Python.
        assert_eq!(attached.line.contains("sys.remote_exec"), !is_asleep, "{}", attached.line);
        if is_asleep {
            assert_eq!(program.0.line(), "awake");
        } else {
            assert_eq!(program.ask("step"), "stepped");
        }
        attached.detach();
        let process = only_process(&run);
        assert_eq!((&process["end_reason"], &process["lost"]), (&"detached".into(), &0.into()), "{process:#}");
        assert_eq!(manifest(&run)["attached"].get("stopped_ns").is_some(), is_asleep);
        assert_eq!(scripts(), 0);
    }
    let run = folder.path().join("last");
    let Some(attached) = Attached::start(program.0.pid(), &run) else { return };
    let state = program.state();
    attached.detach();
    let (blocks, reserved) = end_state(&events(&only_trace(&run)));
    assert_eq!((blocks, reserved), (blocks_of(&state), state["reserved"].as_u64().unwrap()));
    program.stop();
}

mod exhaustive {
    use super::*;

    memtrace_tests::for_each_version! { mod versions: blocks_are_complete }

    fn blocks_are_complete(versions: Versions) {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let traced = TracedProgram::python("attach/training.py", &["2", "pool"]).on(versions);
        let mut program = Program::begin(traced);
        let Some(attached) = Attached::start(program.0.pid(), &run) else { return };
        assert_eq!(program.ask("step"), "stepped");
        let state = program.state();
        attached.detach();
        let (blocks, reserved) = end_state(&events(&only_trace(&run)));
        assert_eq!((blocks, reserved), (blocks_of(&state), state["reserved"].as_u64().unwrap()));
        program.stop();
    }

    #[test]
    fn without_a_tracker_the_blocks_that_were_there_are_reported_as_missing() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let traced = TracedProgram::python("attach/training.py", &["2"]).on(Versions::REPORTER_ONLY);
        let mut program = Program::begin(traced);
        let Some(attached) = Attached::start(program.0.pid(), &run) else { return };
        assert_eq!(program.ask("step"), "stepped");
        let text = attached.detach();
        let warning = "warning: the memory that was in use before memtrace attached is not known: the tracker cannot \
                       be attached to PyTorch's allocator\n";
        assert!(text.contains(warning), "{text}");
        let process = only_process(&run);
        assert_eq!((&process["end_reason"], &process["lost"]), (&"detached".into(), &0.into()), "{process:#}");
        program.stop();
    }
}
