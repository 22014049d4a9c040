//! Threads that the program cancels (`pthread_cancel`).
//!
//! A call of CUDA is no cancellation point for the program, and memtrace makes none of it: each call returns, each
//! event is recorded or counted, and the thread ends where it ends without memtrace. The oracle is the program's own
//! count.

use std::time::Duration;

use crate::crash_support::*;
use memtrace_tests::programs::ProgramFolder;
use memtrace_tests::traced_program::TracedProgram;
use memtrace_trace::counters::Counter;
use memtrace_trace::event::Action;

/// The number of events of an allocation and its free.
const PAIR: u64 = 2;

fn start(parts: &[&str], under_memtrace: bool) -> (ProgramFolder, Scenario) {
    let programs = ProgramFolder::new();
    let program = programs.program_over_bare_driver("crash/cancel.c", "cancel");
    let mut command = vec![program.as_os_str()];
    command.extend(parts.iter().map(std::ffi::OsStr::new));
    let traced = TracedProgram::command(&command).env("LD_LIBRARY_PATH", programs.path(""));
    (programs, Scenario::start(traced, under_memtrace, None))
}

/// Runs the program's next part. Returns the number of pairs and the duration of the slowest one.
#[track_caller]
fn part(scenario: &mut Scenario) -> (u64, Duration) {
    scenario.send_line();
    let line = scenario.line();
    let (pairs, slowest) = line.split_once(' ').unwrap_or_else(|| panic!("{line:?}: {}", scenario.launcher_messages()));
    (pairs.parse().unwrap(), Duration::from_micros(slowest.parse().unwrap()))
}

/// Requires that the program ended with its own status, and that its trace holds every event or counts it. Returns the
/// number of events recorded and dropped.
#[track_caller]
fn assert_accounted_for(scenario: &mut Scenario, expected: u64) -> (u64, u64) {
    assert_eq!(scenario.end(), Ending { code: 3, stdout: String::new() });
    let [(_, trace)] = &scenario.traces()[..] else { panic!("one trace") };
    let (events, end) = (all_events(trace), trace.end().unwrap());
    assert_eq!((end.lost, end.late, trace.counter(Counter::Reentered)), (0, 0, 0));
    let allocations = events.iter().filter(|event| event.action == Action::Alloc).count() as u64;
    let (recorded, dropped) = (events.len() as u64, trace.counter(Counter::EventsDropped));
    assert_eq!(recorded + dropped, expected, "{allocations} allocations");
    scenario.assert_nothing_is_left();
    (recorded, dropped)
}

/// The first event connects to the launcher with calls that are cancellation points.
#[test]
fn a_pending_request_does_not_end_a_thread_inside_its_first_call() {
    let parts = ["pending", "3", "between", "8", "handlers", "pending", "3"];
    let expected: Vec<u64> = vec![4, 0, 2, 4];
    let (_programs, mut alone) = start(&parts, false);
    let (_folder, mut scenario) = start(&parts, true);
    let mut total = 0;
    for (index, expected) in expected.into_iter().enumerate() {
        let (theirs, ours) = (part(&mut alone).0, part(&mut scenario).0);
        if index == 1 {
            // Each thread makes a pair before and one after the request. How many it makes in between is not
            // determined.
            assert!(theirs >= 16 && ours >= 16, "{theirs} {ours}");
        } else {
            assert_eq!((theirs, ours), (expected, expected));
        }
        total += ours * PAIR;
    }
    assert_eq!(alone.end(), Ending { code: 3, stdout: String::new() });
    assert_eq!(assert_accounted_for(&mut scenario, total).1, 0);
}

/// A full ring lets the thread sleep, which is a cancellation point. So is each step of connecting to a launcher.
#[test]
fn a_pending_request_does_not_end_a_thread_that_waits_for_a_stopped_launcher() {
    for begin_before in [true, false] {
        let parts = ["between", "1", "pending", "12000", "pending", "20000"];
        let (_programs, mut scenario) = start(if begin_before { &parts } else { &parts[2..] }, true);
        let mut total = if begin_before { part(&mut scenario).0 } else { 0 };
        scenario.stop_launcher();
        // 12,000 pairs are 24,000 events; a ring has 8,192 slots.
        let (pairs, slowest) = part(&mut scenario);
        assert_eq!(pairs, 12_001);
        assert!(slowest < STOPPED, "{slowest:?}");
        scenario.resume_launcher();
        total += pairs + part(&mut scenario).0;
        let (recorded, dropped) = assert_accounted_for(&mut scenario, total * PAIR);
        assert!(dropped > 0 && recorded > 0, "{recorded} recorded, {dropped} dropped");
    }
}
