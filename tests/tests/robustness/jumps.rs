//! Signal handlers that leave a hook by `siglongjmp`.
//!
//! The thread lives on, and what it held in the hook stays held. No other thread waits for it without a limit, and
//! every event that is not recorded is counted. The programs end themselves after 90 s, so a hang fails the test.

use memtrace_tests::programs::ProgramFolder;
use memtrace_tests::traced_program::{Run, TracedProgram};
use memtrace_trace::counters::Counter;

use crate::hostile_support::PAIR;

fn run(arguments: &[&str]) -> Run {
    let programs = ProgramFolder::new();
    let program = programs.program_over_bare_driver("loader/jumping.c", "jumping");
    let words: Vec<&str> = std::iter::once(program.to_str().unwrap()).chain(arguments.iter().copied()).collect();
    let traced = TracedProgram::command(&words).env("LD_LIBRARY_PATH", programs.path(""));
    traced.option("--quiet").run()
}

/// The numbers of events that were recorded and that were counted as lost.
fn recorded_and_lost(run: &Run) -> (u64, u64) {
    let traces = run.traces();
    let lost = |trace: &memtrace_trace::file::Reader| {
        trace.counter(Counter::EventsDropped) + trace.counter(Counter::Reentered)
    };
    // An event that was left between its number and its end is a gap in the numbers, which the trace counts as lost.
    let recorded = |trace: &memtrace_trace::file::Reader| {
        assert!(trace.damage().is_none(), "{:?}", trace.damage());
        trace.events().map(|block| block.expect("a sound block").len() as u64).sum::<u64>()
    };
    (traces.iter().map(recorded).sum(), traces.iter().map(lost).sum())
}

#[track_caller]
fn assert_left(run: &Run, expected: &str) {
    run.assert_ended_well();
    assert_eq!(String::from_utf8_lossy(&run.output.stdout), expected);
}

#[test]
fn the_first_call_is_left_and_the_same_thread_calls_again() {
    let run = run(&["first", "same"]);
    assert_left(&run, "left 1\n");
    // The call was left before it was made. The recording starts anew at the next call, so the other threads never
    // wait.
    assert_eq!(recorded_and_lost(&run), ((50 + 3 * 300) * PAIR as u64, 0));
}

#[test]
fn the_first_call_is_left_and_other_threads_call() {
    let run = run(&["first", "others"]);
    assert_left(&run, "left 1\n");
    // The call was left before it was made. Each of the other threads waits once before its first call. If another one
    // starts the recording meanwhile, it may lose the events of that call.
    let all = (50 + 3 * 300) * PAIR as u64;
    let (recorded, lost) = recorded_and_lost(&run);
    assert!(
        recorded + lost == all && lost <= 10,
        "{recorded} recorded and {lost} lost of {all}: {}",
        String::from_utf8_lossy(&run.output.stderr)
    );
}

#[test]
fn later_calls_are_left_at_random_moments() {
    let run = run(&["later", "300"]);
    assert_left(&run, "left all\n");
    // The threads that no signal disturbs: one during the jumps, three afterwards, and then this one.
    let undisturbed = (4 * 300 + 50) * PAIR as u64;
    let (recorded, lost) = recorded_and_lost(&run);
    assert!(recorded + lost >= undisturbed, "{recorded} recorded and {lost} lost of {undisturbed} at least");
    assert!(lost <= 300 * PAIR as u64, "{lost} lost");
}
