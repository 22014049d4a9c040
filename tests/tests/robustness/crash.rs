//! A killed program leaves a complete trace, and a killed launcher leaves the program undisturbed.
//!
//! The simulated CUDA's ledger is the oracle. After SIGKILL the trace holds every call of the ledger, except the one
//! call that each thread was making. After the launcher is killed, the program gives the same output as without
//! memtrace. Its trace stays readable up to about the time of the kill.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};

use memtrace_tests::ledger::{assert_beginning, assert_equal, assert_whole_when_killed, calls_of, ours, read};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{Run, TracedProgram, events};
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::Reader;

/// A program that is still running under memtrace.
struct Running {
    folder: tempfile::TempDir,
    launcher: Child,
    /// The process id of the traced process.
    pid: i32,
    stdout: BufReader<ChildStdout>,
}

impl Running {
    /// Starts a program that prints its process id on its first line.
    fn start(traced: TracedProgram) -> Running {
        let folder = tempfile::Builder::new().prefix("memtrace-test-").tempdir().unwrap();
        let traced = traced.option("--quiet").env("SIMCUDA_LEDGER", folder.path().join("ledger"));
        let mut command = traced.prepare(Some(&folder.path().join("run")));
        let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(launcher.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let pid = line.trim().parse().expect("the program says its process id");
        Running { folder, launcher, pid, stdout }
    }

    /// Waits until the ledger holds at least `bytes` bytes.
    fn wait_for_ledger(&self, bytes: u64) {
        let path = self.folder.path().join("ledger");
        while std::fs::metadata(&path).map_or(0, |m| m.len()) < bytes {
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
    }

    fn ledger(&self) -> memtrace_tests::ledger::Calls {
        read(&self.folder.path().join("ledger"))
    }

    /// Reads stdout to its end and returns everything that the program has not printed yet.
    fn rest(&mut self) -> String {
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        rest
    }

    /// The trace of the run, or `None` when no process got as far as recording. Panics when there are several traces.
    fn trace(&self) -> Option<Reader> {
        let files = std::fs::read_dir(self.folder.path().join("run")).unwrap().map(|e| e.unwrap().path());
        let traces: Vec<_> = files.filter(|p| p.extension().is_some_and(|e| e == "mtr")).collect();
        assert!(traces.len() <= 1, "{traces:?}");
        traces.first().map(|path| Reader::open(path).expect("a readable trace"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A failed test leaves no process running. The program is killed only while the launcher is not collected:
        // until then `pid` still belongs to the launcher's child.
        if self.launcher.try_wait().is_ok_and(|ended| ended.is_none()) {
            kill(self.pid, libc::SIGKILL);
            let _ = self.launcher.wait();
        }
    }
}

fn kill(pid: i32, signal: i32) {
    // SAFETY: `kill` takes two integers and touches no memory of this process. `pid` is a process that this test
    // started.
    unsafe { libc::kill(pid, signal) };
}

/// All events of the trace in file order, including those whose pair is missing.
#[track_caller]
fn all_events(trace: &Reader) -> Vec<Event> {
    trace.events().flat_map(|block| block.expect("a sound block")).collect()
}

/// A deterministic random generator, so that the points in time are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Checks the trace of a process that SIGKILL ended. Only the call that each of its `threads` threads was making may be
/// missing.
#[track_caller]
fn assert_killed_whole(running: &mut Running, threads: u64) {
    assert_eq!(running.launcher.wait().unwrap().code(), Some(128 + libc::SIGKILL));
    let trace = running.trace().expect("a trace");
    assert!(trace.damage().is_none(), "{:?}", trace.damage());
    let end = trace.end().expect("the launcher has finished the trace");
    assert_eq!((end.wait_status, end.late), (Some(libc::SIGKILL), 0));
    assert!(end.lost <= threads, "{} numbers taken and not used", end.lost);
    assert_whole_when_killed(&calls_of(&trace, &all_events(&trace)), &running.ledger());
}

#[test]
fn a_program_killed_at_any_time_has_a_complete_history() {
    let programs = ProgramFolder::new();
    let program = programs.program("crash/loop.c", "loop", &linked_with("libcudart.so.12"));
    let mut random = Random(1);
    for _ in 0..20 {
        let mut running = Running::start(with_simcuda(&[program.as_os_str(), "4".as_ref(), "0".as_ref()]));
        running.wait_for_ledger(1 + random.below(400_000));
        kill(running.pid, libc::SIGKILL);
        assert_killed_whole(&mut running, 4);
    }
}

#[test]
fn a_program_killed_at_its_first_call_has_a_complete_history() {
    let programs = ProgramFolder::new();
    let program = programs.program("crash/loop.c", "loop", &linked_with("libcudart.so.13"));
    for _ in 0..5 {
        let mut running = Running::start(with_simcuda(&[program.as_os_str(), "1".as_ref(), "0".as_ref()]));
        running.wait_for_ledger(1);
        kill(running.pid, libc::SIGKILL);
        assert_eq!(running.launcher.wait().unwrap().code(), Some(137));
        // The process may die before it asks the launcher for a segment. Then it has no trace and made at most one
        // call.
        let ledger = running.ledger();
        match running.trace() {
            Some(trace) => assert_whole_when_killed(&calls_of(&trace, &all_events(&trace)), &ledger),
            None => assert!(ledger.values().map(Vec::len).sum::<usize>() <= 1, "{ledger:?}"),
        }
    }
}

#[test]
fn a_program_ended_by_any_signal_has_a_complete_history() {
    let programs = ProgramFolder::new();
    let program = programs.program("process/process.c", "process", &linked_with("libcudart.so.12"));
    let ledger = programs.path("ledger");
    for how in ["abort", "segv", "wild", "trap", "kill", "interrupt"] {
        let traced = with_simcuda(&[program.as_os_str(), "end".as_ref(), how.as_ref()]).option("--quiet");
        let alone = traced.run_alone();
        let run = traced.env("SIMCUDA_LEDGER", &ledger).run();
        let signal = alone.status.signal().expect("it dies of a signal");
        assert_eq!(run.output.status.code(), Some(128 + signal), "{how}");
        assert_eq!((&alone.stdout, &alone.stderr), (&run.output.stdout, &run.output.stderr), "{how}");
        let trace = run.trace();
        assert_equal(&ours(&trace), &read(&ledger));
        let is_reading = |e: &&Event| e.action == Action::DeviceUsage;
        assert_eq!(events(&trace).iter().filter(|e| !is_reading(e)).count(), 8 * 4, "{how}");
        assert_eq!(trace.end().unwrap().wait_status.map(|s| s & 0x7f), Some(signal), "{how}");
        std::fs::remove_file(&ledger).unwrap();
    }
}

/// Runs the training program so that it ends as `how` names, with and without memtrace. Compares both outputs and the
/// trace with the ledger, and returns the recorded run.
#[track_caller]
fn train(how: &str) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("ledger");
    let traced = TracedProgram::python("crash/train.py", &[how]).option("--quiet");
    let alone = traced.run_alone();
    let run = traced.env("SIMCUDA_LEDGER", &ledger).run();
    let code = alone.status.code().or(alone.status.signal().map(|s| 128 + s));
    assert_eq!(run.output.status.code(), code, "{how}");
    assert_eq!(String::from_utf8_lossy(&alone.stdout), String::from_utf8_lossy(&run.output.stdout), "{how}");
    assert_eq!(String::from_utf8_lossy(&alone.stderr), String::from_utf8_lossy(&run.output.stderr), "{how}");
    let trace = run.trace();
    assert_equal(&ours(&trace), &read(&ledger));
    assert!(events(&trace).iter().filter(|e| e.source == Source::Torch).count() > 100, "{how}: three steps");
    run
}

#[test]
fn an_unhandled_exception_leaves_a_complete_history() {
    assert_eq!(train("exception").output.status.code(), Some(1));
}

#[test]
fn an_unhandled_out_of_memory_error_is_recorded_and_its_text_is_unchanged() {
    let run = train("oom");
    assert_eq!(run.output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&run.output.stderr).contains("Tried to allocate 1024.00 GiB"));
    let events = events(&run.trace());
    let oom: Vec<_> = events.iter().filter(|e| e.action == Action::Oom).map(|e| e.size).collect();
    assert_eq!(oom, [1 << 40]);
}

#[test]
fn a_training_program_killed_in_a_step_has_a_complete_history() {
    let mut running = Running::start(TracedProgram::python("crash/train.py", &["loop"]));
    let served = std::fs::metadata(running.folder.path().join("ledger")).unwrap().len();
    running.wait_for_ledger(served + 20_000);
    kill(running.pid, libc::SIGKILL);
    // Two threads allocate: the main thread and autograd's backward thread.
    assert_killed_whole(&mut running, 2);
    let trace = running.trace().unwrap();
    assert!(all_events(&trace).iter().filter(|e| e.source == Source::Torch).count() > 100);
}

#[test]
fn ctrl_c_raises_keyboard_interrupt_and_leaves_a_complete_history() {
    let mut running = Running::start(TracedProgram::python("crash/train.py", &["loop"]));
    kill(running.pid, libc::SIGINT);
    let status = running.launcher.wait().unwrap();
    let mut stdout = String::new();
    running.launcher.stderr.take().unwrap().read_to_string(&mut stdout).unwrap();
    assert!(stdout.trim_end().ends_with("KeyboardInterrupt"), "{stdout}");
    assert_eq!(status.code(), Some(130));
    let trace = running.trace().unwrap();
    assert_equal(&ours(&trace), &running.ledger());
    assert_eq!(trace.end().unwrap().wait_status, Some(libc::SIGINT));
}

/// Kills the launcher once the ledger holds `bytes` bytes, then lets the program run to its end. Returns the program's
/// output and the number of events in its trace, which is 0 without a trace.
fn without_launcher(program: &Path, rounds: &str, bytes: u64) -> (String, usize) {
    let mut running = Running::start(with_simcuda(&[program.as_os_str(), "4".as_ref(), rounds.as_ref()]));
    running.wait_for_ledger(bytes);
    running.launcher.kill().unwrap();
    running.launcher.wait().unwrap();
    // The program's stdout ends when the program ends.
    let stdout = running.rest();
    let Some(trace) = running.trace() else { return (stdout, 0) };
    assert!(trace.end().is_none());
    assert!(trace.damage().damaged_ranges <= 1, "a cut tail at most: {:?}", trace.damage());
    let events = all_events(&trace);
    for (index, event) in events.iter().enumerate() {
        assert_eq!(event.seq, index as u64 + 1, "the beginning, without gaps");
    }
    assert_beginning(&calls_of(&trace, &events), &running.ledger());
    (stdout, events.len())
}

#[test]
fn a_launcher_killed_at_any_time_leaves_a_readable_trace_and_the_program_unchanged() {
    let programs = ProgramFolder::new();
    let program = programs.program("crash/loop.c", "loop", &linked_with("libcudart.so.12"));
    let mut random = Random(2);
    let mut saved = 0;
    for _ in 0..8 {
        let (stdout, events) = without_launcher(&program, "8000", 1 + random.below(9_000_000));
        assert_eq!(stdout, "done 32000\n");
        saved += events;
    }
    assert!(saved > 0, "something was saved in one of them");
}

mod exhaustive {
    use super::*;

    #[test]
    fn a_python_program_that_aborts_has_a_complete_history() {
        assert_eq!(train("abort").output.status.code(), Some(134));
    }

    #[test]
    fn a_python_program_that_reads_invalid_memory_has_a_complete_history() {
        assert_eq!(train("segv").output.status.code(), Some(139));
    }

    #[test]
    fn a_python_program_that_calls_os_exit_has_a_complete_history() {
        assert_eq!(train("_exit").output.status.code(), Some(3));
    }
}
