//! Processes and threads that start and end in every way.
//!
//! Each process that allocates has its own complete trace, with every definition that its events refer to. No process
//! is disturbed, whatever it does to its descriptors, its threads and its other preloaded libraries.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use memtrace_tests::ledger::{Calls, assert_equal, ours, pid, read_all};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{Run, TracedProgram, events};
use memtrace_trace::counters::Counter;
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::Reader;

/// The number of events of one allocation and its free through the runtime: each is recorded by the runtime and the
/// driver.
const PAIR: usize = 4;

/// The compiled `tests/programs/process/process.c` and its environment.
struct Fixture {
    programs: ProgramFolder,
    program: PathBuf,
    ledger: Option<PathBuf>,
}

impl Fixture {
    /// Uses the simulated CUDA and its ledger.
    fn simulated() -> Fixture {
        let programs = ProgramFolder::new();
        let program = programs.program("process/process.c", "process", &linked_with("libcudart.so.12"));
        let ledger = Some(programs.path("ledger"));
        Fixture { programs, program, ledger }
    }

    /// Uses a driver that does almost nothing, without a ledger.
    fn bare() -> Fixture {
        let programs = ProgramFolder::new();
        let program = programs.program_over_bare_driver("process/process.c", "process");
        Fixture { programs, program, ledger: None }
    }

    fn traced(&self, arguments: &[&str]) -> TracedProgram {
        let mut command = vec![self.program.as_os_str()];
        command.extend(arguments.iter().map(std::ffi::OsStr::new));
        match &self.ledger {
            Some(_) => with_simcuda(&command),
            None => TracedProgram::command(&command).env("LD_LIBRARY_PATH", self.programs.path("")),
        }
    }

    /// Runs the program with and without memtrace. Compares output and status, and every trace with the ledger. Returns
    /// the run and its traces by file name.
    #[track_caller]
    fn run(&self, arguments: &[&str]) -> (Run, Vec<Reader>) {
        let traced = self.traced(arguments);
        let alone = traced.run_alone();
        let run = match &self.ledger {
            Some(ledger) => traced.env("SIMCUDA_LEDGER", ledger).run(),
            None => traced.run(),
        };
        assert_eq!(alone.status, run.output.status, "{}", String::from_utf8_lossy(&run.output.stderr));
        assert_eq!(String::from_utf8_lossy(&alone.stdout), String::from_utf8_lossy(&run.output.stdout));
        let traces = run.traces();
        if let Some(ledger) = &self.ledger {
            compare(&traces, ledger);
            std::fs::remove_file(ledger).unwrap();
        }
        traces.iter().for_each(assert_defined);
        (run, traces)
    }
}

/// Compares every trace with the ledger of its process.
#[track_caller]
fn compare(traces: &[Reader], ledger: &Path) {
    let mut ledgers = read_all(ledger);
    // A process that called `exec` has two traces and one ledger.
    let mut recorded: BTreeMap<u32, Calls> = BTreeMap::new();
    let mut traces: Vec<&Reader> = traces.iter().collect();
    traces.sort_by_key(|t| (pid(t), t.path().file_stem().is_some_and(|s| s.to_string_lossy().contains('.'))));
    for trace in traces {
        let process = recorded.entry(pid(trace)).or_default();
        for (tid, calls) in ours(trace) {
            process.entry(tid).or_default().extend(calls);
        }
    }
    for (pid, ours) in recorded {
        assert_equal(&ours, &ledgers.remove(&pid).unwrap_or_default());
    }
    assert!(ledgers.is_empty(), "processes without a trace: {:?}", ledgers.keys());
}

/// Requires that a trace defines everything that its events refer to.
#[track_caller]
fn assert_defined(trace: &Reader) {
    for event in events(trace) {
        assert!(trace.definitions().module(event.module).is_some(), "{event:?}");
        assert!(trace.definitions().thread(event.thread).is_some(), "{event:?}");
    }
}

/// The number of events of each trace, in ascending order.
fn counts(traces: &[Reader]) -> Vec<usize> {
    let mut counts: Vec<usize> = traces.iter().map(|t| events(t).len()).collect();
    counts.sort_unstable();
    counts
}

#[test]
fn a_forked_child_and_its_parent_have_a_trace_each() {
    let fixture = Fixture::simulated();
    for how in ["fork", "raw-fork", "raw-clone"] {
        let (_, traces) = fixture.run(&[how, "3"]);
        assert_eq!(counts(&traces), [5 * PAIR, (3 + 2) * PAIR], "{how}");
    }
}

#[test]
fn a_child_forked_before_the_first_event_has_a_trace() {
    let fixture = Fixture::simulated();
    for how in ["fork", "raw-fork", "raw-clone"] {
        let (_, traces) = fixture.run(&[how, "0"]);
        assert_eq!(counts(&traces), [2 * PAIR, 5 * PAIR], "{how}");
    }
}

#[test]
fn children_of_children_have_traces() {
    let (_, traces) = Fixture::simulated().run(&["generations", "6"]);
    assert_eq!(counts(&traces), [1, 2, 3, 4, 5, 6].map(|n| n * PAIR));
}

#[test]
fn programs_started_by_vfork_posix_spawn_and_system_have_traces() {
    let fixture = Fixture::simulated();
    for how in ["vfork", "spawn", "system"] {
        let (_, traces) = fixture.run(&[how]);
        assert_eq!(counts(&traces), [5 * PAIR, 5 * PAIR], "{how}");
    }
}

#[test]
fn a_program_that_calls_exec_has_two_traces_under_one_pid() {
    let (run, traces) = Fixture::simulated().run(&["exec"]);
    assert_eq!(counts(&traces), [3 * PAIR, 5 * PAIR]);
    assert_eq!(pid(&traces[0]), pid(&traces[1]));
    let manifest = run.manifest();
    let reasons: Vec<_> = manifest["processes"].as_array().unwrap().iter().map(|p| p["end_reason"].clone()).collect();
    assert_eq!(reasons, ["replaced by exec", "exited"]);
}

#[test]
fn children_forked_during_calls_of_other_threads_are_recorded() {
    let fixture = Fixture::bare();
    let run = fixture.traced(&["storm", "3", "30"]).run();
    run.assert_ended_well();
    let traces = run.traces();
    assert_eq!(traces.len(), 31);
    let mut children = 0;
    for trace in &traces {
        assert_defined(trace);
        let events = events(trace);
        if events.len() == 10 * PAIR {
            let owner = trace.definitions().thread(events[0].thread).unwrap();
            assert_eq!(owner.tid, pid(trace), "the only thread of a child is its main thread");
            assert!(events.iter().all(|e| e.thread == events[0].thread));
            children += 1;
        }
    }
    assert_eq!(children, 30);
}

#[test]
fn a_daemon_is_recorded_until_the_command_ends_and_unchanged() {
    let fixture = Fixture::bare();
    let (gate, report) = (fixture.programs.path("gate"), fixture.programs.path("report"));
    for fifo in [&gate, &report] {
        let path = std::ffi::CString::new(fifo.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: `path` is a live, NUL-terminated C string for the duration of the call.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    }
    let run = fixture.traced(&["daemon", gate.to_str().unwrap(), report.to_str().unwrap()]).run();
    run.assert_ended_well();
    let trace = run.trace();
    assert_eq!(events(&trace).len(), 5 * PAIR);
    assert_eq!(trace.end().unwrap().reason, "still running");
    // The launcher has ended; the daemon continues.
    std::fs::OpenOptions::new().write(true).open(&gate).unwrap().write_all(b"go").unwrap();
    let mut stdout = String::new();
    std::fs::File::open(&report).unwrap().read_to_string(&mut stdout).unwrap();
    assert_eq!(stdout, "fine");
}

#[test]
fn every_way_to_end_a_process_leaves_a_complete_history() {
    let fixture = Fixture::simulated();
    for how in ["_exit", "exit_group", "quick_exit", "exit", "pthread_exit"] {
        let (_, traces) = fixture.run(&["end", how]);
        assert_eq!(counts(&traces), [8 * PAIR], "{how}");
    }
}

#[test]
fn two_thousand_short_lived_threads_have_distinct_ids() {
    let (_, traces) = Fixture::simulated().run(&["short-lived", "2000"]);
    let events = events(&traces[0]);
    assert_eq!(events.len(), 2000 * PAIR);
    let mut by_thread: BTreeMap<u32, usize> = BTreeMap::new();
    for event in &events {
        *by_thread.entry(traces[0].definitions().thread(event.thread).unwrap().tid).or_default() += 1;
    }
    // The kernel reuses thread ids, but not within 2000 threads.
    assert_eq!(by_thread.len(), 2000);
    assert!(by_thread.values().all(|n| *n == PAIR));
}

#[test]
fn more_threads_than_rings_lose_no_event() {
    let fixture = Fixture::bare();
    let (_, traces) = fixture.run(&["crowd", "1500", "64"]);
    let events = events(&traces[0]);
    assert_eq!(events.len(), 1500 * 2 * PAIR);
    let allocations = events.iter().filter(|e| e.action == Action::Alloc).count();
    assert_eq!(allocations, 1500 * PAIR);
    // Threads that share a ring also keep separate thread ids.
    let mut threads: Vec<_> = events.iter().map(|e| e.thread).collect();
    threads.sort();
    threads.dedup();
    assert_eq!(threads.len(), 1500);
}

#[test]
fn the_smallest_thread_stacks_are_enough() {
    // The process's first event, which also starts the recording, happens on such a stack.
    let (_, traces) = Fixture::bare().run(&["crowd", "20", "16"]);
    assert_eq!(counts(&traces), [20 * 2 * PAIR]);
}

#[test]
fn no_file_descriptor_is_used() {
    let (run, _) = Fixture::bare().run(&["descriptors"]);
    assert_eq!(String::from_utf8_lossy(&run.output.stdout), "3\n3\n3\n");
}

#[test]
fn a_program_may_close_and_reuse_every_descriptor() {
    let (run, traces) = Fixture::bare().run(&["close-all"]);
    assert_eq!(String::from_utf8_lossy(&run.output.stdout), "lowest 0, wrong 0\n");
    assert_eq!(counts(&traces), [(3 + 2000 + 3) * PAIR]);
}

#[test]
fn a_program_without_free_descriptors_continues() {
    let fixture = Fixture::bare();
    let (_, traces) = fixture.run(&["no-descriptors", "0"]);
    assert_eq!(counts(&traces), [(3 + 4) * PAIR]);
    // Without descriptors from the start nothing is recorded, and nothing else happens.
    let (_, traces) = fixture.run(&["no-descriptors", "1"]);
    assert!(traces.is_empty());
}

#[test]
fn events_before_the_connection_are_counted() {
    let (_, traces) = Fixture::bare().run(&["no-descriptors", "2"]);
    let [trace] = traces.as_slice() else { panic!("{} traces", traces.len()) };
    let (recorded, missed) = (trace.event_count(), trace.counter(Counter::EventsDropped));
    assert_eq!(recorded + missed, (4 + 100) * PAIR as u64, "{recorded} recorded, {missed} missed");
    assert!(missed >= 4 * PAIR as u64 && recorded > 0, "{recorded} recorded, {missed} missed");
}

#[test]
fn a_child_with_an_empty_environment_is_unchanged() {
    let fixture = Fixture::bare();
    let program = fixture.program.to_str().unwrap();
    let library_path = format!("LD_LIBRARY_PATH={}", fixture.programs.path("").display());
    let traced = TracedProgram::command(&["env", "-i", &library_path, program, "some", "3"]);
    let (alone, run) = (traced.run_alone(), traced.run());
    assert_eq!((alone.status.code(), run.output.status.code()), (Some(0), Some(0)));
    assert!(run.traces().is_empty());
}

#[test]
fn other_preloaded_libraries_are_unchanged() {
    // The other library hooks `cudaMalloc` and `dlsym` itself, and makes allocations of one size fail.
    let programs = ProgramFolder::new();
    let preload = programs.library("process/preload.c", "preload.so", &["-fvisibility=default"]);
    programs.library("cuda/library.c", "liblinked.so", &linked_with("libcudart.so.12"));
    let local = programs.library("cuda/library.c", "liblocal.so", &linked_with("libcudart.so.12"));
    let here = format!("-L{}", programs.path("").display());
    let run_path = format!("-Wl,-rpath,{}", programs.path("").display());
    let mut options = linked_with("libcudart.so.12");
    options.splice(0..0, [here, run_path, "-l:liblinked.so".to_owned()]);
    let program = programs.program("process/preloaded.c", "preloaded", &options);
    let command = [program.as_os_str(), local.as_os_str(), "libcudart.so.12".as_ref()];
    // A shell inside the command sets `LD_PRELOAD`, so that the launcher itself does not load the other library.
    let script = r#"LD_PRELOAD="$LD_PRELOAD:$0" exec "$@""#;
    let mut shell = vec!["sh".as_ref(), "-c".as_ref(), script.as_ref(), preload.as_os_str()];
    shell.extend(command);
    let traced = with_simcuda(&shell);
    let (alone, run) = (traced.run_alone(), traced.run());
    run.assert_ended_well();
    let stdout = String::from_utf8_lossy(&run.output.stdout);
    assert_eq!(String::from_utf8_lossy(&alone.stdout), stdout);
    assert!(
        stdout.contains("from the other library") && stdout.contains("preload: 12 allocations, 1 questions"),
        "{stdout}"
    );
    // memtrace records the calls that the other library passes on and those that it refuses.
    let refused: Vec<Event> = events(&run.trace()).into_iter().filter(|e| e.size == 4321).collect();
    assert_eq!(refused.iter().map(|e| e.result).collect::<Vec<_>>(), [2; 4]);
}
