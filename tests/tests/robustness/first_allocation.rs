//! SIGKILL at every system call of the first allocation of a process. It is the call that connects to the launcher, so
//! a process that is killed inside it could leave nothing behind.
//!
//! Where the simulated CUDA has made the allocation, the recording has its event or counts it as lost.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::crash_support::*;
use memtrace_tests::ledger::pid as pid_of;
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::tracee::{Change, Follow, Tracee};

/// The number of programs at once.
const AT_ONCE: usize = 3;

/// The progress of a process when it was killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    /// It had not allocated.
    Nothing,
    /// It has allocated. The event is lost, and counted.
    Lost,
    /// It has allocated, and the driver's event is recorded.
    Recorded,
}

/// Kills the process after `stops` entries to system calls and returns from them. `None` if it makes fewer inside the
/// allocation.
#[track_caller]
fn kill_after(program: &Path, whose: &str, stops: usize) -> Option<Left> {
    let traced = with_simcuda(&[program.as_os_str(), whose.as_ref()]).option("--no-snapshot");
    let mut scenario = Scenario::start(traced, true, None);
    let [mark] = scenario.addresses[..] else { panic!("an address") };
    let process = Tracee::seize(scenario.pid, Follow::Nothing);
    scenario.send_line();
    process.run_to(mark);
    for _ in 0..stops {
        assert_eq!(process.to_system_call(), Change::SystemCall);
        if process.registers().orig_rax as i64 == libc::SYS_exit_group {
            return None;
        }
    }
    kill(scenario.pid, libc::SIGKILL);
    process.release();
    let code = if whose == "child" { 0 } else { 128 + libc::SIGKILL };
    assert_eq!(scenario.end(), Ending { code, stdout: String::new() });
    Some(left(&scenario))
}

/// Compares the recording of the killed process with the ledger.
#[track_caller]
fn left(scenario: &Scenario) -> Left {
    let pid = scenario.pid as u32;
    let calls: usize = scenario.ledgers().get(&pid).map_or(0, |ledger| ledger.values().map(Vec::len).sum());
    let traces: Vec<_> = scenario.traces().into_iter().filter(|(_, trace)| pid_of(trace) == pid).collect();
    let events: usize = traces.iter().map(|(_, trace)| all_events(trace).len()).sum();
    let lost: u64 = traces.iter().map(|(_, trace)| trace.end().expect("an end").lost).sum();
    assert_eq!(scenario.manifest()["losses"]["lost"], lost);
    assert!(traces.len() <= 1 && lost <= 1, "{} traces, {lost} events lost", traces.len());
    match (calls, events, lost) {
        (0, 0, _) => Left::Nothing,
        (_, 0, 1) => Left::Lost,
        (_, 1.., 0) => Left::Recorded,
        _ => panic!("{calls} calls, {events} events, {lost} lost"),
    }
}

/// Kills a process at each system call of the allocation.
#[track_caller]
fn assert_nothing_is_silent(whose: &str) {
    let programs = ProgramFolder::new();
    let program = programs.program("crash/first.c", "first", &linked_with("libcudart.so.12"));
    let (next, end) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let found = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let stops = next.fetch_add(1, Ordering::Relaxed);
                    if stops >= end.load(Ordering::Relaxed) {
                        return;
                    }
                    match kill_after(&program, whose, stops) {
                        Some(left) => found.lock().unwrap().push((stops, left)),
                        None => _ = end.fetch_min(stops, Ordering::Relaxed),
                    }
                }
            });
        }
    });
    let found = found.into_inner().unwrap();
    let count = |kind| found.iter().filter(|(_, left)| *left == kind).count();
    let [nothing, lost, recorded] = [Left::Nothing, Left::Lost, Left::Recorded].map(count);
    println!("{whose}: {nothing} kills before the allocation, {lost} before its event, {recorded} after");
    assert!(nothing > 0 && lost > 0 && recorded > 0, "{found:?}");
}

#[test]
fn of_a_program() {
    assert_nothing_is_silent("plain");
}

#[test]
fn of_a_child_that_was_forked_after_an_allocation() {
    assert_nothing_is_silent("child");
}
