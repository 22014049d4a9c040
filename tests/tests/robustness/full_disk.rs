//! A disk that fills up and has space again later, as when another job's files are removed.
//!
//! The recording of a process ends where a write fails: without the frees in between, later events would give a wrong
//! picture. The missing events are counted, the file stays readable, and processes that start afterwards are recorded
//! in full. The oracle is the simulated CUDA's ledger.

use crate::crash_support::*;
use memtrace_tests::ledger::{assert_beginning, assert_equal, calls_of, pid};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_trace::counters::Counter;
use memtrace_trace::file::Reader;

/// The number of events of one allocation and its free: the driver and the runtime record each.
const PAIR: u64 = 4;

fn start(arguments: &[&str], disk: &str) -> (ProgramFolder, Scenario) {
    let programs = ProgramFolder::new();
    let program = programs.program("crash/batches.c", "batches", &linked_with("libcudart.so.12"));
    let mut command = vec![program.as_os_str()];
    command.extend(arguments.iter().map(std::ffi::OsStr::new));
    let scenario = Scenario::start(with_simcuda(&command), true, Some(disk));
    (programs, scenario)
}

#[track_caller]
fn batch(scenario: &mut Scenario) {
    scenario.send_line();
    assert_eq!(scenario.line(), "done", "{}", scenario.launcher_messages());
}

/// Requires that every event of every process is in its file or counted, and that each file is readable and is the
/// beginning of what its process did. Returns the files and the number of events that are counted as missing.
#[track_caller]
fn assert_accounted_for(scenario: &Scenario) -> (Vec<Reader>, u64) {
    let (ledgers, manifest) = (scenario.ledgers(), scenario.manifest());
    let traces: Vec<Reader> = scenario.traces().into_iter().map(|(_, trace)| trace).collect();
    assert_eq!(traces.len(), ledgers.len(), "one file for each process");
    let mut missing = 0;
    for trace in &traces {
        assert!(trace.damage().is_none(), "{:?}", trace.damage());
        let (id, end) = (pid(trace), trace.end().expect("an end"));
        assert_eq!((end.lost, end.late), (0, 0));
        let ledger = &ledgers[&id];
        assert_beginning(&calls_of(trace, &all_events(trace)), ledger);
        let process = manifest["processes"].as_array().unwrap().iter().find(|p| p["pid"] == id).unwrap();
        let count = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
        let dropped = count(&process["counters"][Counter::EventsDropped.name()]);
        let absent = count(&process["unwritten"]) + dropped;
        let made: usize = ledger.values().map(Vec::len).sum();
        assert_eq!(trace.event_count() + absent, made as u64, "{process:#}");
        missing += absent;
    }
    (traces, missing)
}

/// The disk is full while the first process works. It is free again before the second one starts.
#[test]
fn a_process_that_starts_once_the_disk_is_free_again_is_recorded_in_full() {
    let (_programs, mut scenario) = start(&["own", "500", "own", "20000", "child", "500", "own", "500"], "4m");
    batch(&mut scenario);
    wait_for("the first batch to be written", || scenario.written() == 500 * PAIR);
    scenario.fill_disk();
    // The program makes far more events than the ring and the launcher's queue hold. So some were to be written.
    batch(&mut scenario);
    wait_for("the launcher to notice", || is_closed(&scenario));
    scenario.free_disk();
    batch(&mut scenario);
    batch(&mut scenario);
    assert_eq!(scenario.end(), Ending { code: 3, stdout: String::new() });
    let messages = scenario.launcher_messages();
    assert!(messages.contains("No space left on device"), "{messages}");
    let (traces, missing) = assert_accounted_for(&scenario);
    assert!(missing > 0);
    let (ledgers, mut complete) = (scenario.ledgers(), 0);
    for trace in &traces {
        if pid(trace) == scenario.pid as u32 {
            let reason = &trace.end().unwrap().reason;
            assert!(reason.contains("events are missing in this file"), "{reason}");
        } else {
            assert_equal(&calls_of(trace, &all_events(trace)), &ledgers[&pid(trace)]);
            complete += 1;
        }
    }
    assert_eq!(complete, 1);
    let report = scenario.report();
    assert!(report.contains("unwritten"), "{report}");
    scenario.assert_nothing_is_left();
}

/// The disk is full and free in turn while processes start, work and end.
#[test]
fn a_disk_that_fills_up_again_and_again_leaves_readable_files_and_exact_counts() {
    let arguments: Vec<&str> = ["own", "2000", "child", "2000"].repeat(6);
    let (_programs, mut scenario) = start(&arguments, "4m");
    for turn in 0..12 {
        // Four kinds of turns: the batch begins and ends with a full or a free disk.
        if turn % 4 >= 2 {
            scenario.fill_disk();
        }
        batch(&mut scenario);
        scenario.free_disk();
    }
    assert_eq!(scenario.end(), Ending { code: 3, stdout: String::new() });
    let (traces, missing) = assert_accounted_for(&scenario);
    println!("{} files, {missing} events are missing and counted", traces.len());
    let manifest = scenario.manifest();
    let sum: u64 = ["unwritten", "dropped"].iter().map(|kind| manifest["losses"][kind].as_u64().unwrap()).sum();
    assert_eq!((sum, manifest["losses"]["lost"].as_u64()), (missing, Some(0)));
    let report = scenario.report();
    assert_eq!(report.contains("unwritten"), manifest["losses"]["unwritten"] != 0, "{report}");
    scenario.assert_nothing_is_left();
}

/// Whether the launcher has closed the shared memory of the program, because its file cannot be written.
fn is_closed(scenario: &Scenario) -> bool {
    use memtrace_trace::shm::layout::SegmentHeader;
    use std::os::unix::fs::FileExt;
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", scenario.pid)).unwrap();
    let line = maps.lines().find(|line| line.contains("/memfd:memtrace ")).expect("it records");
    let base = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
    let mut closed = [0; 4];
    let memory = std::fs::File::open(format!("/proc/{}/mem", scenario.pid)).expect("the memory of our descendant");
    let at = base + std::mem::offset_of!(SegmentHeader, closed) as u64;
    memory.read_exact_at(&mut closed, at).unwrap();
    closed != [0; 4]
}
